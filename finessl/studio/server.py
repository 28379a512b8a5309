"""HTTP around a `Studio`: every route reads its arguments, calls one method and answers JSON."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from finessl.data.decoding import ImageError
from finessl.errors import FinesslError

try:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
except ImportError as error:
    raise FinesslError(f"finessl studio needs {error.name}: pip install 'finessl[studio]'.") from error

from finessl.studio.grid import View
from finessl.studio.security import Access, Guard, TooLarge
from finessl.studio.session import Studio

STATIC = Path(__file__).parent / "static"
MOST_ITEMS, MOST_QUEUE, MOST_LABELS, MOST_THUMBNAILS = 1000, 20, 100_000, 200  # per request
SWITCH = 0.001  # seconds that a thread which computes may hold up the one that answers requests
TICK, HEARTBEAT = 0.25, 15.0  # seconds: between two looks for changes; between two signs of life
FOREVER = "private, max-age=31536000, immutable"
Handler = Callable[[Studio, Any], Any]


class Server:
    def __init__(self, studio: Studio, access: Access) -> None:
        self.studio, self.access = studio, access
        self.closing = False

    def app(self) -> Starlette:
        read, write = self.read, self.write
        routes = [
            Route("/", self.index),
            Mount("/static", StaticFiles(directory=STATIC), name="static"),
            Route("/thumb/{image:int}", self.thumbnail),
            Route("/image/{image:int}", self.image),
            Route("/api/events", self.events),
            Route("/api/state", read(lambda s, q: s.state())),
            Route("/api/queue", read(get_queue)),
            Route("/api/grid", read(get_grid)),
            Route("/api/thumbnails", read(get_thumbnails)),
            Route("/api/classes", write(post_classes), methods=["POST"]),
            Route("/api/label", write(post_label), methods=["POST"]),
            Route("/api/labels", write(post_labels), methods=["POST"]),
            Route("/api/undo", write(post_undo), methods=["POST"]),
            Route("/api/train", read(lambda s, q: s.trainer.state())),
            Route("/api/train", write(post_train), methods=["POST"]),
            Route("/api/review", read(lambda s, q: {"items": s.review.items(q.get("kind", "doubtful"))})),
            Route("/api/review", write(post_review), methods=["POST"]),
            Route("/api/audit", read(lambda s, q: s.audit.view())),
            Route("/api/audit", write(post_audit), methods=["POST"]),
            Route("/api/export", read(lambda s, q: s.exports.view())),
            Route(
                "/api/export", write(lambda s, b: s.exports.export(b.get("what"), b.get("format"))), methods=["POST"]
            ),
        ]
        handlers: Any = {
            HTTPException: show_error,
            FinesslError: show_mistake,
            TooLarge: show_too_large,
            Exception: show_failure,
        }
        return Starlette(routes=routes, exception_handlers=handlers, middleware=[Middleware(Guard, access=self.access)])

    def read(self, work: Handler) -> Any:
        async def answer(request: Request) -> JSONResponse:
            return JSONResponse(await run_in_threadpool(work, self.studio, request.query_params))

        return answer

    def write(self, work: Handler) -> Any:
        async def answer(request: Request) -> JSONResponse:
            try:
                body = json.loads(await request.body() or b"{}")
            except (ValueError, RecursionError) as error:
                raise FinesslError("the request is not valid JSON.") from error
            if not isinstance(body, dict):
                raise FinesslError("the request should be a JSON object.")
            return JSONResponse(await run_in_threadpool(work, self.studio, body))

        return answer

    async def index(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})

    async def thumbnail(self, request: Request) -> Response:
        return await self.picture(request, self.studio.thumbnails.get, self.studio.thumbnails.packed)

    async def image(self, request: Request) -> Response:
        return await self.picture(request, self.studio.thumbnails.large)

    async def picture(
        self, request: Request, work: Callable[[int], bytes], ready: Callable[[int], bytes | None] | None = None
    ) -> Response:
        """By id, never by path. Kept by the browser for as long as the ids mean the same images (`v` of the project).

        ready: what is read at once, as a thread would take longer than the work."""
        studio = self.studio
        number = request.path_params["image"]
        if number >= len(studio.images):
            raise HTTPException(404, f"there is no image {str(number)[:20]}.")
        fixed = request.query_params.get("v") == studio.identity
        tag = f'"{studio.identity}-{number}"'
        headers = {"Cache-Control": FOREVER if fixed else "private, no-cache", "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        try:
            content = ready(number) if ready else None
            content = content or await run_in_threadpool(work, number)
        except ImageError as error:
            studio.suggestions.broken[number] = True  # the queue passes it over
            raise HTTPException(422, f"this image cannot be shown: {error}") from error
        return Response(content, media_type="image/jpeg", headers=headers)

    async def events(self, request: Request) -> Response:
        return StreamingResponse(self.stream(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def stream(self) -> AsyncIterator[str]:
        """State and training whenever they have changed, at most four times a second."""
        sent: dict[str, str] = {}
        alive = time.monotonic()
        while not self.closing:
            state = await run_in_threadpool(self.studio.state)
            for name, value in (("state", state), ("training", state["training"])):
                content = json.dumps(value)
                if sent.get(name) != content:
                    sent[name] = content
                    alive = time.monotonic()
                    yield f"event: {name}\ndata: {content}\n\n"
            if time.monotonic() - alive > HEARTBEAT:
                alive = time.monotonic()
                yield ": alive\n\n"
            await asyncio.sleep(TICK)


# ---- arguments ------------------------------------------------------------------------------------------------------


def whole(query: Any, name: str, default: int, most: int) -> int:
    text = query.get(name, "")
    if text == "":
        return default
    if not text.isdecimal() or len(text) > 9 or int(text) > most:
        raise FinesslError(f"{name} should be a number from 0 to {most:,}.")
    return int(text)


def share(query: Any, name: str, default: float) -> float:
    try:
        value = float(query.get(name) or default)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise FinesslError(f"{name} should be a number from 0 to 1.")
    return value


def numbers(query: Any, name: str, most: int) -> list[int]:
    given = [text for part in query.getlist(name) for text in part.split(",") if text]
    if len(given) > most or not all(text.isdecimal() and len(text) < 10 for text in given):
        raise FinesslError(f"{name} should be at most {most:,} image numbers.")
    return list(map(int, given))


def get_queue(studio: Studio, query: Any) -> Any:
    return studio.queue(whole(query, "n", 4, MOST_QUEUE), set(numbers(query, "after", MOST_ITEMS)))


def get_grid(studio: Studio, query: Any) -> Any:
    group = query.get("class", "")
    view = View(
        group=studio.labels.class_id(whole(query, "class", 0, 10**6)) if group else None,
        label=query.get("label") or "any",
        low=share(query, "min", 0.0),
        high=share(query, "max", 1.0),
        source=query.get("source", ""),
        text=query.get("q", ""),
        sort=query.get("sort") or "typical",
    )
    return studio.grid.page(view, whole(query, "offset", 0, 10**9), whole(query, "limit", 200, MOST_ITEMS))


def get_thumbnails(studio: Studio, query: Any) -> Any:
    """A screen of thumbnails in one answer: a browser takes several times as long for a request each."""
    images = [studio.image_id(i) for i in numbers(query, "images", MOST_THUMBNAILS)]
    return {"jpegs": [b64encode(content).decode() for content in studio.thumbnails.many(images)]}


def post_classes(studio: Studio, body: dict[str, Any]) -> Any:
    studio.edit_classes(body)
    return studio.state()


def post_label(studio: Studio, body: dict[str, Any]) -> Any:
    need(body, "image", "class")
    found = studio.assign([body["image"]], body["class"], body.get("source", "queue"))
    return found | {"next": studio.queue(4)["items"]}


def post_labels(studio: Studio, body: dict[str, Any]) -> Any:
    need(body, "images", "class")
    images = body["images"]
    if not isinstance(images, list) or len(images) > MOST_LABELS:
        raise FinesslError(f"images should be a list of at most {MOST_LABELS:,} numbers.")
    return studio.assign(images, body["class"], body.get("source", "sort"))


def post_undo(studio: Studio, body: dict[str, Any]) -> Any:
    return studio.undo() | {"next": studio.queue(4)["items"]}


def post_train(studio: Studio, body: dict[str, Any]) -> Any:
    budget, steps, trainer = body.get("budget"), body.get("steps"), studio.trainer
    if budget is not None and (
        isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 1 <= budget <= 1e6
    ):
        raise FinesslError("budget should be a number of seconds.")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 10**6):
        raise FinesslError("steps should be a number from 1 to 1,000,000.")
    action = body.get("action")
    if action == "start":
        studio.save_labels()
        trainer.start(budget, steps)
    elif action == "stop":
        trainer.stop()
    elif action == "resume":
        trainer.resume()
    else:
        raise FinesslError("action should be start, stop or resume.")
    studio.touch()
    return trainer.state()


def post_review(studio: Studio, body: dict[str, Any]) -> Any:
    need(body, "image", "action")
    image, action = studio.image_id(body["image"]), body["action"]
    label = int(studio.labels.label[image])
    if action == "change":
        need(body, "class")
        return studio.assign([image], body["class"], "review")
    if action not in ("accept", "ignore"):
        raise FinesslError("action should be accept, change or ignore.")
    if action == "accept" and "class" in body:
        return studio.assign([image], body["class"], "review")
    studio.labels.assign([image], label, "ignore")
    studio.changed()
    return studio.totals()


def post_audit(studio: Studio, body: dict[str, Any]) -> Any:
    need(body, "image", "class")
    found = studio.audit.answer(studio.image_id(body["image"]), studio.class_or_none(body["class"]))
    studio.changed()
    return found


def need(body: dict[str, Any], *names: str) -> None:
    for name in names:
        if name not in body:
            raise FinesslError(f"the request should name: {', '.join(names)}.")


# ---- errors ---------------------------------------------------------------------------------------------------------


async def show_error(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def show_mistake(request: Request, error: FinesslError) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 400)


async def show_too_large(request: Request, error: TooLarge) -> JSONResponse:
    return JSONResponse({"error": "the request is too large."}, 413)


async def show_failure(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": "the studio failed at this; the terminal says why. What was labeled is kept."}, 500)


def serve(studio: Studio, access: Access, listener: socket.socket) -> None:
    """Answer requests until interrupted."""
    try:
        import uvicorn
    except ImportError as error:
        raise FinesslError("finessl studio needs uvicorn: pip install 'finessl[studio]'.") from error
    sys.setswitchinterval(SWITCH)
    server = Server(studio, access)
    config = uvicorn.Config(
        server.app(), log_level="warning", access_log=False, timeout_keep_alive=30, timeout_graceful_shutdown=1
    )
    config.limit_concurrency = 256

    class Ends(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            server.closing = True  # ends the event streams, which would hold the server open
            super().handle_exit(sig, frame)

    Ends(config).run(sockets=[listener])
