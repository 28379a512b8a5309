"""`finessl studio` in a process of its own, talked to over HTTP as a browser would, with its memory."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finessl.errors import FinesslError

IDLE = 5.0  # seconds after which a connection is opened again
SAMPLING = 0.5  # seconds between two looks at the memory


class Running:
    """more: options of `finessl studio`.   environment: on top of this process's."""

    def __init__(self, data: Path, *more: str, **environment: str) -> None:
        begun = time.perf_counter()
        command = [sys.executable, "-m", "finessl", "studio", str(data), "--backbone", "embedded", "--no-browser"]
        self.process = subprocess.Popen(
            [*command, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | environment,
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if found := re.search(r"(http://\S+?)/auth\?token=\S+", line):
                self.address, self.origin = found[0], found[1]
                break
        else:
            self.process.wait()
            raise FinesslError(f"finessl studio did not start. It says: {''.join(said).strip()}")
        self.seconds = time.perf_counter() - begun  # until it listens
        self.port = int(self.origin.rsplit(":", 1)[1])
        self.http = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        self.cookie, self.used = "", time.monotonic()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fetch(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        if not self.cookie:
            self.cookie = "-"
            self.fetch(self.address.removeprefix(self.origin))
        if time.monotonic() - self.used > IDLE:
            self.http.close()  # the server has, or will have, closed it
        self.used = time.monotonic()
        headers = {"Cookie": self.cookie, "X-Finessl": "1", "Content-Type": "application/json"}
        self.http.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
        answer = self.http.getresponse()
        content = answer.read()
        if given := answer.headers.get("set-cookie"):
            self.cookie = given.split(";")[0]
        if answer.status >= 400:
            raise FinesslError(f"{path} answered {answer.status}: {content[:200].decode(errors='replace')}")
        return content

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return json.loads(self.fetch(path, body))

    def wait_for_suggestions(self, events: int, seconds: float = 60) -> None:
        """Until they are fitted to all labels up to event number `events`."""
        end = time.monotonic() + seconds
        while self.ask("/api/state")["fitted"] < events:
            if time.monotonic() > end:
                raise FinesslError(f"the suggestions have not followed the labels within {seconds:.0f} seconds.")
            time.sleep(0.005)

    def close(self, how: int = signal.SIGTERM) -> None:
        """Does nothing where it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            self.process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


def end_with_parent() -> None:
    """Whatever ends this process, be it SIGKILL, also ends the studio that it started (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class MemoryWatch(threading.Thread):
    """The most memory that a process, and it and those that it starts, have had. Empty where the system does not tell.

    MB (10⁶ bytes): resident memory of the process; of all, memory that processes share is counted once."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.ended = process, threading.Event()
        self.now, self.peak, self.peak_of_all = 0.0, 0.0, 0.0

    def __enter__(self) -> MemoryWatch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()

    def run(self) -> None:
        while True:
            status = memory_of(self.process, "status")
            self.now, self.peak = status.get("VmRSS", 0.0), status.get("VmHWM", 0.0)
            shared = sum(memory_of(one, "smaps_rollup").get("Pss", 0.0) for one in descendants(self.process))
            self.peak_of_all = max(self.peak_of_all, shared)
            if self.ended.wait(SAMPLING):
                return

    def figures(self) -> dict[str, float]:
        found = {"memory_mb": self.now, "peak_memory_mb": self.peak, "peak_of_all_mb": self.peak_of_all}
        return found if self.peak else {}


def memory_of(process: int, file: str) -> dict[str, float]:
    """The lines `Name: 12 kB` of a file in /proc, in MB."""
    try:
        text = Path(f"/proc/{process}/{file}").read_text()
    except OSError:  # it has ended, or there is no /proc
        return {}
    return {name: int(size) * 1024 / 1e6 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def descendants(process: int) -> Iterator[int]:
    """The process and all that it has started."""
    yield process
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from descendants(int(child))
