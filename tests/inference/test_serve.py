"""The server's answers are the classifier's; what a client can do wrong has its own status."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from starlette.testclient import TestClient  # noqa: E402

import finessl  # noqa: E402
from finessl.bench import serve as bench_serve  # noqa: E402
from finessl.cli import app  # noqa: E402
from finessl.errors import FinesslError  # noqa: E402
from finessl.inference.serve import Batcher, Busy, Limits, Service, ThisThread  # noqa: E402
from finessl.runtime.network import bind, is_loopback  # noqa: E402

from .conftest import MakeRun  # noqa: E402

URL = "http://127.0.0.1"


@pytest.fixture(scope="module")
def classifier(make_run: MakeRun) -> finessl.Classifier:
    return finessl.load(make_run(), device="cpu")


@pytest.fixture(scope="module")
def client(classifier: finessl.Classifier) -> Iterator[TestClient]:
    limits = Limits(images=4, megabytes=0.1, queue=8)
    with TestClient(Service(classifier, limits).app(), base_url=URL) as client:
        yield client


@pytest.fixture
def files(shapes: Path) -> list[Path]:
    return [shapes / "test" / name / "00.png" for name in ("across", "diagonal", "down")]


def form(files: list[Path]) -> list[tuple[str, tuple[str, bytes]]]:
    return [("image", (file.parent.name, file.read_bytes())) for file in files]


def test_one_image(client: TestClient, classifier: finessl.Classifier, files: list[Path]) -> None:
    answer = client.post("/predict", content=files[0].read_bytes())
    assert answer.status_code == 200
    (row,) = answer.json()["predictions"]
    assert row["label"] == classifier.predict(files[0])[0]
    assert row["confidence"] == pytest.approx(float(classifier.predict_proba(files[0]).max()), abs=1e-5)


def test_several_images_and_classes(client: TestClient, classifier: finessl.Classifier, files: list[Path]) -> None:
    answer = client.post("/predict?top=3", files=form(files))
    rows = answer.json()["predictions"]
    assert [row["name"] for row in rows] == ["across", "diagonal", "down"]
    assert [row["label"] for row in rows] == classifier.predict(files)
    assert sum(entry["confidence"] for entry in rows[0]["top"]) == pytest.approx(1, abs=1e-4)


def test_health_and_model(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/model").json()["classes"] == ["across", "diagonal", "down"]


@pytest.mark.parametrize("top", ["0", "4", "x", "-1", "9" * 30])
def test_bad_top(client: TestClient, files: list[Path], top: str) -> None:
    assert client.post(f"/predict?top={top}", content=files[0].read_bytes()).status_code == 400


def test_what_is_no_image(client: TestClient, files: list[Path]) -> None:
    answer = client.post("/predict", content=b"hello")
    assert answer.status_code == 400 and "not an image" in answer.json()["error"]
    mixed = [*form(files[:1]), ("image", ("bad.png", b"hello"))]
    answer = client.post("/predict", files=mixed)
    assert answer.status_code == 400 and answer.json()["error"].startswith("bad.png:")
    assert client.post("/predict", content=b"").status_code == 400
    assert client.post("/predict", data={"a": "b"}, files=[]).status_code == 400
    broken = {"content-type": "multipart/form-data; boundary=x"}
    assert client.post("/predict", content=b"no form at all", headers=broken).status_code == 400
    assert client.post("/predict", content=b"", headers={"content-type": "multipart/form-data"}).status_code == 400
    assert client.get("/predict").status_code == 405 and client.get("/nothing").status_code == 404


def test_too_large_and_too_many(client: TestClient, files: list[Path]) -> None:
    assert client.post("/predict", content=bytes(200_000)).status_code == 413
    stream = (bytes(20_000) for _ in range(10))  # without a length in the header
    assert client.post("/predict", content=stream).status_code == 413
    assert client.post("/predict", files=form(files[:1] * 5)).status_code == 413


def test_foreign_host_is_refused(client: TestClient) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "[::1]evil"):
        assert client.get("/model", headers={"host": host}).status_code in (400, 403), host
    assert client.get("/model", headers={"host": "localhost:8000"}).status_code == 200
    assert is_loopback("::1") and not is_loopback("0.0.0.0") and not is_loopback("example.org")


def test_token(classifier: finessl.Classifier) -> None:
    with TestClient(Service(classifier, Limits(), "secret", local=False).app()) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/model").status_code == 401
        assert client.post("/predict", content=b"x").status_code == 401
        assert client.get("/model", headers={"authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/model", headers={"authorization": "Bearer secret"}).status_code == 200


def test_token_in_any_alphabet(classifier: finessl.Classifier) -> None:
    with TestClient(Service(classifier, Limits(), token="schlüssel 鍵").app(), base_url=URL) as client:
        for token, status in ((b"schl\xfcssel", 401), ("schlüssel 鍵".encode(), 200)):
            assert client.get("/model", headers={b"Authorization": b"Bearer " + token}).status_code == status


def test_class_names_that_are_no_text(classifier: finessl.Classifier, files: list[Path]) -> None:
    odd = ["\udcff", "日本", '"\n']
    named = finessl.Classifier(classifier.network, {**classifier.description, "classes": odd}, classifier.device)
    with TestClient(Service(named, Limits()).app(), base_url=URL) as client:
        assert client.get("/model").json()["classes"] == odd and "日本" in client.get("/model").text
        found = client.post("/predict?top=3", content=files[0].read_bytes()).json()["predictions"][0]
        assert {entry["label"] for entry in found["top"]} == set(odd)


def test_concurrent_requests_share_batches() -> None:
    sizes: list[int] = []

    def predict(images: list[np.ndarray]) -> np.ndarray:
        sizes.append(len(images))
        time.sleep(0.02)
        return np.array([[image[0], 0.0] for image in images])

    async def work() -> list[np.ndarray]:
        batcher = Batcher(predict, Limits(batch=8, wait=0.01, queue=100), ThreadPoolExecutor(1))
        task = asyncio.create_task(batcher.run())
        answers = await asyncio.gather(*(batcher.submit([np.array([i]), np.array([-i])]) for i in range(20)))
        assert batcher.pending == 0
        task.cancel()
        return answers

    for i, answer in enumerate(asyncio.run(work())):
        assert answer[:, 0].tolist() == [i, -i], "every request gets its own answers"
    assert sum(sizes) == 40 and max(sizes) == 8 and len(sizes) == 5


def test_full_queue_and_failing_batch() -> None:
    def fail(images: list[np.ndarray]) -> np.ndarray:
        raise RuntimeError("out of memory")

    async def work() -> None:
        batcher = Batcher(fail, Limits(queue=3), ThreadPoolExecutor(1))
        with pytest.raises(Busy):
            await batcher.submit([np.zeros(1)] * 4)
        task = asyncio.create_task(batcher.run())
        for _ in range(2):  # it goes on after a failure
            with pytest.raises(RuntimeError, match="out of memory"):
                await batcher.submit([np.zeros(1)])
        assert batcher.pending == 0 and not task.done()
        task.cancel()

    asyncio.run(work())


def test_busy_server_answers_503(classifier: finessl.Classifier, files: list[Path]) -> None:
    with TestClient(Service(classifier, Limits(queue=2)).app(), base_url=URL) as client:
        answer = client.post("/predict", files=form(files))
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"


def test_memory_of_requests_is_bounded(classifier: finessl.Classifier, files: list[Path]) -> None:
    service = Service(classifier, Limits(held_megabytes=0.001))
    with TestClient(service.app(), base_url=URL) as client:
        assert client.post("/predict", content=bytes(2000)).status_code == 503
        assert client.post("/predict", content=b"small, no image").status_code == 400
        assert service.held == 0, "what a refused request held is given back"


def test_bad_arguments(make_run: MakeRun) -> None:
    run = str(make_run())
    listener = bind("127.0.0.1", 0)
    listener.listen()
    port = str(listener.getsockname()[1])
    for words, message in (
        (["--port", port], "cannot listen"),
        (["--port", "0", "--provider", "CUDA"], "onnx exports"),
        (["--port", "0", "--token", ""], "--token is empty"),
        (["--port", "0", "--queue", "3"], "--max-images"),
    ):
        with pytest.raises(FinesslError, match=message):
            app(["serve", run, *words], standalone_mode=False)
    listener.close()


def test_bench_counts_requests_and_overhead(
    make_run: MakeRun,
    classifier: finessl.Classifier,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def running_server(*_: object) -> Iterator[tuple[int, int]]:
        with server_of_this_process(Service(classifier, Limits())) as port:
            yield os.getpid(), port

    monkeypatch.setattr(bench_serve, "running_server", running_server)
    words = ["--clients", "4", "--requests", "12", "--repeats", "1", "--device", "cpu"]
    app(["bench", "serve", str(make_run()), *words, "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 12 and found["errors"] == 0 and 0 < found["p50"] <= found["p99"]
    assert found["requests_per_second"] > 0 and found["server"] > 0 and found["bare"] > 0
    assert found["overhead"] == pytest.approx(found["bare"] / found["server"] - 1)


@contextmanager
def real_server(run: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(process, URL) of `finessl serve`."""
    command = [sys.executable, "-m", "finessl", "serve", str(run), "--port", "0", "--device", "cpu", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None and server.stderr is not None
        url = server.stdout.readline().split("/predict")[0]
        assert url.startswith("http://127.0.0.1:"), server.stderr.read()
        yield server, url
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_real_server(make_run: MakeRun, classifier: finessl.Classifier, files: list[Path]) -> None:
    with real_server(make_run()) as (server, url):
        with httpx.Client(base_url=url, timeout=30) as client, ThreadPoolExecutor(8) as pool:
            assert client.get("/health").status_code == 200
            answers = list(pool.map(lambda f: client.post("/predict", content=f.read_bytes()).json(), files * 10))
            assert client.post("/predict", content=b"hello").status_code == 400
        assert [a["predictions"][0]["label"] for a in answers] == classifier.predict(files) * 10
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0


def half_a_request(url: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
    connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\nhalf")
    return connection


@pytest.mark.slow
def test_an_onnx_export_is_served(
    make_run: MakeRun, classifier: finessl.Classifier, files: list[Path], tmp_path: Path
) -> None:
    """Clients that leave in the middle of a request are no matter, nor is one that never ends its own."""
    pytest.importorskip("onnxscript", reason="the extra `export` is not installed")
    app(["export", str(make_run()), "--out", str(tmp_path / "onnx")], standalone_mode=False)
    with real_server(tmp_path / "onnx") as (server, url):
        for _ in range(3):
            half_a_request(url).close()
        with httpx.Client(base_url=url, timeout=30) as client:
            answer = client.post("/predict", files=form(files)).json()
        assert [row["label"] for row in answer["predictions"]] == classifier.predict(files)
        unfinished = half_a_request(url)
        time.sleep(0.5)
        server.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.poll() is None, "it waits for the rest of the request"
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        unfinished.close()
        assert server.stderr is not None and server.stderr.read() == ""


@contextmanager
def server_of_this_process(service: Service) -> Iterator[int]:
    """Its port."""
    uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(service.app(), log_level="error", timeout_graceful_shutdown=service.limits.grace)
    server = uvicorn.Server(config)
    service.connections = server.server_state.connections
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def test_slow_clients(classifier: finessl.Classifier, files: list[Path]) -> None:
    """Half a header, half a body: both end. A connection that goes on to send requests is kept."""
    service = Service(classifier, Limits(seconds=0.5))
    with server_of_this_process(service) as port:
        silent = socket.create_connection(("127.0.0.1", port), timeout=30)
        silent.sendall(b"POST /predict HTTP/1.1\r\nHost: lo")
        half = half_a_request(f":{port}")
        half.settimeout(30)
        busy = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        busy.connect()
        first = busy.sock
        for _ in range(300):
            busy.request("POST", "/predict", files[0].read_bytes())
            assert busy.getresponse().read().startswith(b'{"predictions"')
            if select.select([silent], [], [], 0.1)[0]:
                break
        assert silent.recv(100) == b"", "it is closed"
        assert half.recv(100).startswith(b"HTTP/1.1 408 ") and busy.sock is first


def test_a_stopping_server_answers_what_waits(classifier: finessl.Classifier) -> None:
    service = Service(classifier, Limits(grace=1))
    with server_of_this_process(service) as port:
        half = half_a_request(f":{port}")
        time.sleep(0.2)
    half.settimeout(30)
    assert half.recv(100).startswith(b"HTTP/1.1 503 ")


def test_work_of_other_threads_is_done_in_this_one() -> None:
    """Also behind work that was cancelled or failed, until it is shut down."""
    here, done = ThisThread(), []
    cancelled, failed = here.submit(done.append, "cancelled"), here.submit(int, "x")
    good = here.submit(threading.get_ident)
    assert cancelled.cancel()
    here.shutdown()
    here.run()
    assert done == [] and good.result() == threading.get_ident()
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()
