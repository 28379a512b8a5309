"""`finessl serve`: predictions over HTTP. Images of concurrent requests share batches.

POST /predict    one image as the body, or several as multipart/form-data; ?top=K classes of each (default 1)
GET  /model      classes, image size, limits
GET  /health     {"status": "ok"}, without a token

Errors are JSON, {"error": "…"}: 400 not an image, 401 no token, 408 too slow, 413 too large or too many images in one
request, 503 too many requests at once (try again).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import queue
import signal
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finessl.data.decoding import ImageError, decode
from finessl.errors import FinesslError
from finessl.inference.classifier import Classifier, load, squash
from finessl.inference.onnx_session import OnnxClassifier
from finessl.inference.output import encoded
from finessl.runtime.machine import usable_cores
from finessl.runtime.network import HOST, is_loopback

try:
    from starlette.applications import Starlette
    from starlette.datastructures import UploadFile
    from starlette.exceptions import HTTPException
    from starlette.formparsers import MultiPartException, MultiPartParser
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route
except ImportError as error:
    raise FinesslError(f"finessl serve needs {error.name}: pip install 'finessl[serve]'.") from error

Predict = Callable[[list[np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class Limits:
    batch: int = 32  # images that the model takes at once
    wait: float = 0.005  # seconds that an image waits for others to fill its batch
    queue: int = 1024  # images that wait or are computed, over all requests
    images: int = 256  # images in one request
    megabytes: float = 64  # of one request
    held_megabytes: float = 1024  # of all requests that are being received and decoded
    seconds: float = 60  # for a request to arrive
    grace: int = 10  # seconds in which a server that is stopped answers the requests that it has


class Answer(JSONResponse):
    """JSON in UTF-8; bytes of a class name that are no text are escaped."""

    def render(self, content: Any) -> bytes:
        return encoded(json.dumps(content, ensure_ascii=False, separators=(",", ":")))


class Busy(Exception):
    """The queue is full."""


class Batcher:
    """Puts images of all requests into one queue and gives them to the model in batches."""

    def __init__(self, predict: Predict, limits: Limits, model: Executor) -> None:
        self.predict, self.limits, self.model = predict, limits, model
        self.queue: asyncio.Queue[tuple[np.ndarray, asyncio.Future[np.ndarray]]] = asyncio.Queue()
        self.pending = 0  # images that wait or are computed

    async def submit(self, images: list[np.ndarray]) -> np.ndarray:
        """Probabilities [n, classes] of decoded images."""
        if self.pending + len(images) > self.limits.queue:
            raise Busy
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in images]
        self.pending += len(images)
        try:
            for item in zip(images, futures, strict=True):
                self.queue.put_nowait(item)
            return np.stack(await asyncio.gather(*futures))
        finally:
            self.pending -= len(images)
            for future in futures:
                future.cancel()  # the client has gone; a finished one stays as it is

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [item for item in await self.collect() if not item[1].done()]
            if not batch:
                continue
            try:
                answers = await loop.run_in_executor(self.model, self.predict, [image for image, _ in batch])
            except Exception as error:  # the server outlives a batch that fails
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    async def collect(self) -> list[tuple[np.ndarray, asyncio.Future[np.ndarray]]]:
        """What waits, up to a full batch; fewer once the first has waited long enough."""
        batch = [await self.queue.get()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.wait):
                while len(batch) < self.limits.batch:
                    batch.append(self.queue.get_nowait() if not self.queue.empty() else await self.queue.get())
        return batch


class Service:
    """The web application around a classifier."""

    def __init__(
        self, classifier: Classifier | OnnxClassifier, limits: Limits, token: str | None = None, local: bool = True
    ) -> None:
        self.classifier, self.limits, self.token, self.local = classifier, limits, token, local
        self.decoders = ThreadPoolExecutor(usable_cores(), "decode")
        self.model: Executor = ThreadPoolExecutor(1, "model")  # one batch at a time
        self.held = 0  # bytes of the requests that are being received and decoded
        self.connections: set[Any] = set()  # uvicorn's

    def app(self) -> Starlette:
        routes = [
            Route("/predict", self.post_predict, methods=["POST"]),
            Route("/model", self.get_model),
            Route("/health", self.get_health),
        ]
        handlers: Any = {HTTPException: show_error, Exception: show_failure}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self.lifespan)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.loop = asyncio.get_running_loop()
        self.batcher = Batcher(self.classifier.predict_proba, self.limits, self.model)
        tasks = [asyncio.create_task(work) for work in (self.batcher.run(), self.close_idle())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            self.model.shutdown(wait=True)
            self.decoders.shutdown(wait=False)

    async def close_idle(self) -> None:
        """End connections that have sent no whole header in the time for a request: uvicorn would keep them for ever."""
        before: dict[Any, Any] = {}
        while True:
            await asyncio.sleep(self.limits.seconds)
            idle = {c: c.cycle for c in self.connections if c.cycle is None or c.cycle.response_complete}
            for connection in [c for c, last in idle.items() if c in before and before[c] is last]:
                connection.shutdown()
            before = idle

    async def get_health(self, request: Request) -> Answer:
        self.check_host(request)
        return Answer({"status": "ok"})

    async def get_model(self, request: Request) -> Answer:
        self.admit(request)
        limits = {"images": self.limits.images, "megabytes": self.limits.megabytes, "batch": self.limits.batch}
        return Answer({"classes": self.classifier.classes, "image_size": self.classifier.image_size, "limits": limits})

    async def post_predict(self, request: Request) -> Answer:
        self.admit(request)
        top = self.read_top(request)
        try:
            names, images = await self.read_images(request)
            probabilities = await self.batcher.submit(images)
        except Busy as error:
            raise busy() from error
        except asyncio.CancelledError as error:  # the server is stopped, and its grace is over
            raise HTTPException(503, "the server is stopping.") from error
        rows = [self.answer(name, row, top) for name, row in zip(names, probabilities, strict=True)]
        return Answer({"predictions": rows})

    async def read_images(self, request: Request) -> tuple[list[str], list[np.ndarray]]:
        """The names of the request's images, and their pixels."""
        request.state.held = 0
        try:
            async with asyncio.timeout(self.limits.seconds):
                files = await self.read_files(request)
            return [name for name, _ in files], await self.decode(files)
        except TimeoutError as error:
            raise HTTPException(408, f"the request took over {self.limits.seconds:g} s to arrive.") from error
        except ClientDisconnect as error:
            raise HTTPException(400, "the request is incomplete.") from error  # nobody reads it
        finally:
            self.held -= request.state.held

    def answer(self, name: str, probabilities: np.ndarray, top: int) -> dict[str, Any]:
        order = np.argsort(-probabilities, kind="stable")[:top]
        ranked = [{"label": self.classifier.classes[k], "confidence": round(float(probabilities[k]), 6)} for k in order]
        return {"name": name, **ranked[0], **({"top": ranked} if top > 1 else {})}

    def read_top(self, request: Request) -> int:
        text = request.query_params.get("top", "1")
        if not text.isdecimal() or not 1 <= int(text[:6]) <= len(self.classifier.classes):
            raise HTTPException(400, f"top should be a number from 1 to {len(self.classifier.classes)}.")
        return int(text)

    async def read_files(self, request: Request) -> list[tuple[str, bytes]]:
        """(name, content) of each image of the request. A form is parsed while it arrives."""
        kind = request.headers.get("content-type", "")
        if not kind.lower().startswith("multipart/form-data"):
            body = b"".join([chunk async for chunk in self.receive(request)])
            if not body:
                raise HTTPException(400, "the request is empty; send an image, or several as multipart/form-data.")
            return [("body", body)]
        try:
            stream = self.receive(request)
            parser = MultiPartParser(request.headers, stream, max_files=self.limits.images, max_fields=100)
            form = await parser.parse()
        except HTTPException:
            raise
        except MultiPartException as error:
            if "Too many files" in error.message:
                raise HTTPException(413, f"a request may have {self.limits.images} images.") from error
            raise HTTPException(400, error.message) from error
        except ClientDisconnect:
            raise
        except Exception as error:  # the parser fails in many ways on a body that is no form
            raise HTTPException(400, "the request is not valid multipart/form-data.") from error
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if not files:
            raise HTTPException(400, "the form holds no file.")
        return [(file.filename or f"image {i}", await file.read()) for i, file in enumerate(files)]

    async def receive(self, request: Request) -> AsyncGenerator[bytes]:
        """The body in chunks, within the limits of one request and of all together."""
        most, size = int(self.limits.megabytes * 1e6), 0
        too_large = HTTPException(413, f"a request may have {self.limits.megabytes:g} MB.")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > most:
            raise too_large
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                raise too_large
            self.held += len(chunk)
            request.state.held += len(chunk)
            if self.held > self.limits.held_megabytes * 1e6:
                raise busy()
            yield chunk

    async def decode(self, files: list[tuple[str, bytes]]) -> list[np.ndarray]:
        loop, size = asyncio.get_running_loop(), self.classifier.image_size
        if len(files) + self.batcher.pending > self.limits.queue:  # before the work of decoding
            raise busy()

        def read(content: bytes) -> np.ndarray:
            return squash(decode(content, square=size), size)

        work = [loop.run_in_executor(self.decoders, read, content) for _, content in files]
        found = await asyncio.gather(*work, return_exceptions=True)
        for (name, _), image in zip(files, found, strict=True):
            if isinstance(image, ImageError):
                raise HTTPException(400, f"{name}: {image}")
            if isinstance(image, BaseException):
                raise image
        return list(found)  # type: ignore[arg-type]

    def admit(self, request: Request) -> None:
        self.check_host(request)
        given = request.headers.get("authorization", "").encode("latin-1")  # the bytes that were sent
        if self.token is not None and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise HTTPException(401, "send the header Authorization: Bearer TOKEN.", {"WWW-Authenticate": "Bearer"})

    def check_host(self, request: Request) -> None:
        """A web page elsewhere can make its name mean this machine; a local server answers to local names only."""
        host = HOST.fullmatch(request.headers.get("host", ""))
        if self.local and not (host and is_loopback(host[1])):
            raise HTTPException(403, "this server answers to localhost only.")


def busy() -> HTTPException:
    return HTTPException(503, "too many images are waiting; try again.", {"Retry-After": "1"})


async def show_error(request: Request, error: HTTPException) -> Answer:
    return Answer({"error": error.detail}, error.status_code, error.headers)


async def show_failure(request: Request, error: Exception) -> Answer:
    return Answer({"error": "the prediction failed; the server's log says why."}, 500)


def open_classifier(
    path: str | Path, *, weights: str | None = None, device: str = "auto", provider: str | None = None
) -> Classifier | OnnxClassifier:
    """The classifier of a run, through torch, or of an onnx export, through ONNX Runtime."""
    if (Path(path) / "model.onnx").is_file():
        return OnnxClassifier(path, provider)
    if provider is not None:
        raise FinesslError(f"--provider is for onnx exports; {path} holds no model.onnx.")
    return load(path, weights=weights, device=device)


class ThisThread(Executor):
    """Runs what other threads submit in the thread that calls `run`, until `shutdown`."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.work.put((future, lambda: function(*args, **options)))
        return future

    def run(self) -> None:
        while (item := self.work.get()) is not None:
            future, function = item
            if not future.set_running_or_notify_cancel():  # nobody waits for it any more
                continue
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.work.put(None)


def serve(service: Service, listener: socket.socket) -> None:
    """Answer requests until interrupted.

    The model computes in the main thread and the event loop runs in another. OpenMP counts the main thread among those
    that compute: a second one would be more than there are cores, and then its threads sleep after every operation, which
    makes a small network a quarter slower.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise FinesslError("finessl serve needs uvicorn: pip install 'finessl[serve]'.") from error
    service.model = model = ThisThread()
    config = uvicorn.Config(service.app(), log_level="warning", access_log=False, timeout_keep_alive=30)
    config.limit_concurrency = 4 * service.limits.queue
    config.timeout_graceful_shutdown = service.limits.grace
    server = uvicorn.Server(config)
    service.connections = server.server_state.connections

    def answer() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            model.shutdown()  # also where the server could not start

    def stop(number: int, frame: object) -> None:
        if server.should_exit and server.started:  # the second signal
            service.loop.call_soon_threadsafe(lambda: [task.cancel() for task in server.server_state.tasks])
        server.should_exit = True  # requests that have arrived are answered first

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=answer, name="server")
    thread.start()
    try:
        model.run()
        thread.join()
        if not server.started:
            raise FinesslError("the server could not start; its log says why.")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
