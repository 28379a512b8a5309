"""The views of a step: the right images with the right labels, independent of the number of processes."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from finessl.data.loader import Loader, Prefetcher, Views
from finessl.data.pixel_store import PixelStore
from finessl.data.views import STRONG, WEAK
from finessl.errors import FinesslError
from finessl.runtime.distributed import Processes

CPU = torch.device("cpu")


def loader(
    weak: str | None = "no_grad", strong_views: int = 2, processes: Processes | None = None, **more: object
) -> Loader:
    """Image i is plain grey of level 4·i, so that any (undistorted) view tells which image it shows."""
    levels = (4 * np.arange(40, dtype=np.uint8))[:, None, None, None]
    store = PixelStore.from_array(np.ascontiguousarray(np.broadcast_to(levels, (40, 16, 16, 3))))
    fields: dict = dict(
        weak_view=WEAK["crop-flip"](16),
        strong_view=STRONG["weak"](16),
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        batch_size=4,
        mu=2,
        seed=0,
        device=CPU,
        weak=weak,
        strong_views=strong_views,
        rows=None if processes is None else processes.rows,
    )
    return Loader(store, np.arange(8) % 5, np.arange(8), np.arange(8, 40), **{**fields, **more})


def shown(images: torch.Tensor) -> np.ndarray:
    """Which image each view shows."""
    return (images[:, 0, 8, 8] * 255 / 4).round().long().numpy()


def test_views_show_the_drawn_images() -> None:
    for step in range(20):
        views = loader().load(step)
        assert views.counts == [4, 16] and views.weak is not None and views.index is not None
        labeled, strong = shown(views.trained).tolist()[:4], shown(views.trained)[4:].reshape(2, 8)
        assert max(labeled) < 8 and [i % 5 for i in labeled] == views.labels.tolist()
        unlabeled = 8 + views.index.numpy()
        assert (shown(views.weak) == unlabeled).all()
        assert (strong == unlabeled).all()


@pytest.mark.parametrize(
    ("weak", "strong_views", "counts"),
    [("no_grad", 1, [4, 8]), ("grad", 0, [4, 8]), ("grad", 2, [4, 8, 16]), (None, 0, [4]), (None, 1, [4, 8])],
)
def test_only_what_the_method_needs(weak: str | None, strong_views: int, counts: list[int]) -> None:
    views = loader(weak, strong_views).load(0)
    assert views.counts == counts and len(views.trained) == sum(counts)
    assert (views.weak is not None) == (weak == "no_grad")
    assert (views.index is None) == (counts == [4])


def test_a_step_is_the_same_whenever_it_is_asked_for() -> None:
    used = loader(strong_view=STRONG["randaugment"](16))
    later = [used.load(step) for step in range(12)][11]
    fresh = loader(strong_view=STRONG["randaugment"](16)).load(11)
    assert all(torch.equal(a, b) for a, b in zip(later.tensors(), fresh.tensors(), strict=True))


def test_augmentation_is_never_repeated() -> None:
    """The same image in two steps is two different views."""
    rng = np.random.default_rng(0)
    store = PixelStore.from_array(rng.integers(0, 256, (4, 16, 16, 3), dtype=np.uint8))
    repeated = loader(None, 0)
    repeated.store = store
    repeated.labeled = np.zeros(8, np.int64)
    views = torch.cat([repeated.load(step).trained for step in range(10)]).flatten(1)
    assert len(views.unique(dim=0)) > 20  # of 98 possible crops and flips; 4 if they were replayed


def test_processes_share_the_global_batch() -> None:
    whole = loader(strong_view=STRONG["randaugment"](16)).load(3)
    parts = [loader(processes=Processes(r, 2), strong_view=STRONG["randaugment"](16)).load(3) for r in range(2)]

    def rows(views: Views) -> list[torch.Tensor]:
        labeled, strong = views.trained.split(views.counts)
        assert views.weak is not None
        return [labeled, views.weak, *strong.chunk(2)]

    for together, first, second in zip(rows(whole), *map(rows, parts), strict=True):
        assert torch.equal(together, torch.cat([first, second]))
    for part in parts:
        assert torch.equal(part.labels, whole.labels) and torch.equal(part.index, whole.index)


def test_pool() -> None:
    pooled = loader()
    pooled.draw_from(np.array([3, 5, 7, 9, 11, 13, 15, 17, 19]))
    for step in range(5):
        index = pooled.load(step).index
        assert index is not None and set(index.tolist()) <= {3, 5, 7, 9, 11, 13, 15, 17, 19}
    pooled.draw_from(np.array([], np.int64))
    assert pooled.load(0).index is None


def many_sizes(device: torch.device = CPU) -> Loader:
    """40 images of as many sizes."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(9, 30, (40, 2)).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(3 * sizes.astype(np.int64).prod(1))])
    made = loader(strong_view=STRONG["randaugment"](16), device=device)
    made.store = PixelStore(rng.integers(0, 256, offsets[-1], dtype=np.uint8), offsets, sizes)
    return made


def same(a: Views, b: Views) -> bool:
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(Views.tensors(a), Views.tensors(b), strict=True))


@pytest.mark.parametrize("steps", [11, 30])
def test_a_thread_reads_ahead(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """With CUDA's part played by stand-ins; the images are packed as for a GPU."""
    used = many_sizes()
    threads: list[str] = []

    def images(positions: np.ndarray) -> object:
        threads.append(threading.current_thread().name)
        return used.store.packed(positions, CPU)

    monkeypatch.setattr(used, "images", images)
    stream = SimpleNamespace(record_event=lambda: None, wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    used.device = torch.device("cuda")
    views = Prefetcher(used, steps)
    used.device = CPU
    assert views.thread is not None
    plain = many_sizes()
    for step in [*range(9), *range(2, steps)]:  # also once from an earlier step on
        assert same(views.get(step), plain.load(step))
        views.prepare(step + 1)
    assert threads.count("MainThread") == 2  # of the two starts
    pool = np.array([3, 5, 7, 9, 11, 13, 15, 17, 19])
    views.draw_from(torch.from_numpy(pool))
    plain.draw_from(pool)
    assert all(same(views.get(step), plain.load(step)) for step in range(6))


def test_what_a_thread_could_not_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    used = many_sizes()
    stream = SimpleNamespace(record_event=lambda: None, wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    used.device = torch.device("cuda")
    views = Prefetcher(used, 100)
    used.device = CPU
    views.prepare(0)
    assert views.reading is not None and views.reading[1].result()

    def refuse(positions: np.ndarray) -> object:
        raise FinesslError("damaged")

    monkeypatch.setattr(used, "images", refuse)
    views.ready = {step: made for step, made in views.ready.items() if step == 3}
    views.prepare(2)  # takes what was read before
    with pytest.raises(FinesslError, match="damaged"):
        views.prepare(6)


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [False, True])
def test_a_gpu_shows_images_of_many_sizes_as_the_cpu_does(resident: bool) -> None:
    plain, there = many_sizes(), many_sizes(torch.device("cuda", 0))
    if resident:
        there.store.to_device(there.device)
    views = Prefetcher(there, 30)
    assert (views.thread is None) == resident
    for step in range(30):
        given, expected = views.get(step), plain.load(step)
        views.prepare(step + 1)
        for a, b in zip(given.tensors(), expected.tensors(), strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=1e-6)  # normalised by another processor
