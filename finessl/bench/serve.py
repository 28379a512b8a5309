"""`finessl bench serve RUN`: a server of this machine under load, and what it costs beyond bare prediction.

Load: many clients send single photos. Overhead: one client sends requests of 32 photos, taking turns with a loop that
decodes and predicts the same bytes without a server.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from finessl.bench.scale import write_originals
from finessl.data.decoding import decode
from finessl.errors import FinesslError
from finessl.inference.classifier import squash
from finessl.inference.serve import open_classifier
from finessl.runtime.machine import usable_cores

BATCH = 32
PAUSE = 0.05  # seconds between turns: threads of OpenMP that have nothing to do spin for some milliseconds
BOUNDARY = 32 * "b"  # as long as that of common clients: a parser skips its length at a time


@dataclass(frozen=True)
class Served:
    requests: int
    errors: int
    requests_per_second: float
    p50: float  # milliseconds
    p99: float
    server: float  # images per second of requests of 32 photos
    bare: float  # images per second of the loop without a server
    overhead: float  # of the server, in time: 0.1 is 10 % more than the loop
    cpu_overhead: float | None  # in CPU time; None where the system does not tell it


def bench_serve(
    run: str | Path, *, device: str = "auto", clients: int = 16, requests: int = 300, repeats: int = 9
) -> Served:
    with tempfile.TemporaryDirectory() as folder:
        photos = [path.read_bytes() for path in write_originals(Path(folder) / "photos", BATCH)]
    with running_server(run, device) as (process, port):
        latencies, errors, seconds = load_server(port, photos, clients, requests)
        served, bare, server_cpu, bare_cpu = overhead(run, device, process, port, photos, repeats)
    p50, p99 = np.percentile(latencies, [50, 99]) * 1000
    return Served(
        requests,
        errors,
        requests / seconds,
        float(p50),
        float(p99),
        BATCH / served,
        BATCH / bare,
        served / bare - 1,
        None if server_cpu is None else server_cpu / bare_cpu - 1,
    )


@contextmanager
def running_server(run: str | Path, device: str) -> Iterator[tuple[int, int]]:
    """(process, port) of a server on the loopback address."""
    command = [sys.executable, "-m", "finessl", "serve", str(run), "--port", "0", "--device", device]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert server.stdout is not None and server.stderr is not None
        line = server.stdout.readline()
        if not line.startswith("http://"):
            raise FinesslError(f"the server did not start. {server.stderr.read().strip().removeprefix('finessl: ')}")
        port = int(line.split("/predict")[0].rpartition(":")[2])
        while True:
            try:
                if ask(http.client.HTTPConnection("127.0.0.1", port, timeout=60), "GET", "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.1)
            if server.poll() is not None:
                raise FinesslError(f"the server has ended. {server.stderr.read().strip()}")
        yield server.pid, port
    finally:
        server.terminate()
        server.wait()


def ask(
    connection: http.client.HTTPConnection, verb: str, path: str, body: bytes | None = None, kind: str = "image/jpeg"
) -> tuple[int, bytes]:
    connection.request(verb, path, body, {"content-type": kind} if body else {})
    answer = connection.getresponse()
    return answer.status, answer.read()


def load_server(port: int, photos: list[bytes], clients: int, requests: int) -> tuple[list[float], int, float]:
    """Seconds of each request, the number that failed, and seconds in all."""
    numbers, connections = count(), threading.local()

    def one(_: int) -> tuple[float, bool]:
        if not hasattr(connections, "own"):
            connections.own = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        start = time.perf_counter()
        try:
            status, _body = ask(connections.own, "POST", "/predict", photos[next(numbers) % len(photos)])
        except (OSError, http.client.HTTPException):
            status = 0
            del connections.own
        return time.perf_counter() - start, status == 200

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(clients)))  # connections and the model's first batches are not counted
        start = time.perf_counter()
        answers = list(pool.map(one, range(requests)))
        seconds = time.perf_counter() - start
    return [taken for taken, _ in answers], sum(not good for _, good in answers), seconds


def overhead(
    run: str | Path, device: str, process: int, port: int, photos: list[bytes], repeats: int
) -> tuple[float, float, float | None, float]:
    """Median seconds of 32 photos through the server and without it; the same in CPU time."""
    classifier = open_classifier(run, device=device)
    size = classifier.image_size
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = form(photos)

    def through_server() -> None:
        status, answer = ask(connection, "POST", "/predict", body, f"multipart/form-data; boundary={BOUNDARY}")
        if status != 200:
            raise FinesslError(f"the server refused {len(photos)} photos: {answer.decode(errors='replace')}")

    served, bare, server_cpu, bare_cpu = [], [], [], []
    with ThreadPoolExecutor(usable_cores()) as pool:
        for round_ in range(repeats + 1):
            time.sleep(PAUSE)
            clock, cpu = time.perf_counter(), cpu_seconds(process)
            through_server()
            served_in = time.perf_counter() - clock
            time.sleep(PAUSE)
            middle, own, used = time.perf_counter(), time.process_time(), cpu_seconds(process)
            classifier.predict_proba(list(pool.map(lambda data: squash(decode(data, square=size), size), photos)))
            if round_:  # the first warms up
                served.append(served_in)
                bare.append(time.perf_counter() - middle)
                bare_cpu.append(time.process_time() - own)
                if cpu is not None and used is not None:
                    server_cpu.append(used - cpu)
    return median(served), median(bare), median(server_cpu) if server_cpu else None, median(bare_cpu)


def form(photos: list[bytes]) -> bytes:
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="{number}.jpg"\r\n\r\n'.encode()
        + photo
        + b"\r\n"
        for number, photo in enumerate(photos)
    ]
    return b"".join([*parts, f"--{BOUNDARY}--\r\n".encode()])


def cpu_seconds(process: int) -> float | None:
    """CPU time that another process has used so far, where the system tells it (Linux)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
