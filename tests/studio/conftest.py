"""A folder of 45 small photos in three colours, and studios on copies of its state; features are made up, not encoded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("starlette", reason="the studio's extra is not installed")

from starlette.testclient import TestClient  # noqa: E402

from finessl.bench.browser import SIZE, chromium, find_chromium  # noqa: E402
from finessl.errors import FinesslError  # noqa: E402
from finessl.studio.features import Encoded  # noqa: E402
from finessl.studio.project import held, open_project  # noqa: E402
from finessl.studio.security import Access  # noqa: E402
from finessl.studio.server import Server  # noqa: E402
from finessl.studio.session import Studio  # noqa: E402

COLOURS = {"blue": (40, 60, 200), "green": (40, 200, 60), "red": (200, 60, 40)}
PATIENCE = 120_000  # milliseconds until a test in a browser gives up; a loaded machine encodes slowly
WRITE = {"X-Finessl": "1", "Content-Type": "application/json"}


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("studio") / "photos"
    root.mkdir()
    rng = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        for i in range(15):
            pixels = (np.array(colour) + rng.normal(0, 20, (24, 32, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / f"{name}{i}.jpg")
    return root


class Client:
    """A browser with the cookie."""

    def __init__(self, studio: Studio) -> None:
        self.studio, self.access = studio, Access()
        self.http = TestClient(Server(studio, self.access).app(), base_url="http://127.0.0.1")
        assert self.http.get(f"/auth?token={self.access.token}", follow_redirects=False).status_code == 303

    def get(self, path: str, status: int = 200) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        answer = self.http.post(path, content=json.dumps({} if body is None else body), headers=WRITE)
        assert answer.status_code == status, answer.text
        return answer.json()

    def label(self, image: int, colour: str | None) -> Any:
        return self.post("/api/label", {"image": image, "class": None if colour is None else self.ids()[colour]})

    def ids(self) -> dict[str, int]:
        return {c["name"]: c["id"] for c in self.get("/api/state")["classes"]}

    def truth(self, image: int) -> str:
        return self.studio.images.key(image).rstrip("0123456789.jpg")

    def add_features(self, noise: float = 0.1) -> None:
        """Clusters by colour, as a good backbone would give."""
        rng, count = np.random.default_rng(1), len(self.studio.images)
        keys = [self.truth(i) for i in range(count)]
        names = sorted(set(keys))
        rows = np.eye(8)[[names.index(key) for key in keys]] + noise * rng.normal(size=(count, 8))
        self.studio.suggestions.publish(Encoded.of(np.arange(count), rows.astype(np.float16), count).with_graph())
        self.studio.suggestions.update()


@pytest.fixture
def open_studio(photos: Path, tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """Opens a studio, by default always on the same folder; closed at the end, or by opening the next one."""
    with ExitStack() as stack:

        def make(data: Path = photos, out: Path = tmp_path / "state", classes: bool = True, **more: Any) -> Client:
            stack.close()
            project = open_project(data, out, **more)
            stack.enter_context(held(project))
            studio = Studio(project, "embedded")
            stack.callback(studio.close)
            client = Client(studio)
            for name in COLOURS if classes and not studio.labels.names else ():
                client.post("/api/classes", {"add": name})
            return client

        yield make


@pytest.fixture
def client(open_studio: Callable[..., Client]) -> Client:
    return open_studio()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        find_chromium()
    except FinesslError as error:
        pytest.skip(f"{error} make test-browser installs what is missing.")
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    from playwright.sync_api import expect

    context = browser.new_context(viewport=SIZE)
    context.set_default_timeout(PATIENCE)
    expect.set_options(timeout=PATIENCE)
    yield context.new_page()
    context.close()
