"""Views of a batch against a second implementation, one image at a time in Pillow, that is given the same draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from finessl.data import pixel_ops
from finessl.data.pixel_ops import Packed
from finessl.data.views import STRONG, WEAK, CentreView, Draws, WeakView, evaluation_view, normalise, take
from finessl.errors import FinesslError


def stored(sizes: list[tuple[int, int]], seed: int = 0) -> tuple[Tensor, np.ndarray]:
    """Images of these heights and widths, padded to the largest with something that must never be seen."""
    rng = np.random.default_rng(seed)
    height, width = np.max(sizes, axis=0)
    pixels = rng.integers(0, 256, (len(sizes), height, width, 3), dtype=np.uint8)
    for i, (h, w) in enumerate(sizes):
        y, x = np.mgrid[0:h, 0:w, 0:1][:2]
        wave = 110 * np.sin(x / rng.uniform(2, 20, 3) + y / rng.uniform(2, 20, 3)) + rng.normal(128, 10, (h, w, 3))
        pixels[i, :h, :w] = wave.clip(0, 255)
    return torch.from_numpy(pixels), np.array(sizes)


def packed(pixels: Tensor, sizes: np.ndarray, device: str = "cpu") -> Packed:
    """The same images one after the other, with something between them."""
    parts = [
        torch.cat([image[:h, :w].flatten(), image.new_full((7,), 99)])
        for image, (h, w) in zip(pixels, sizes, strict=True)
    ]
    start = np.cumsum([0, *(len(part) for part in parts)])[:-1]
    return Packed(torch.cat(parts).to(device), start, sizes)


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """By Pillow, the horizontal pass first (since release 13 it chooses the order by the shape)."""
    bilinear = Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(image).resize((width, len(image)), bilinear).resize((width, height), bilinear))


def weak_by_pillow(pixels: Tensor, view: WeakView, draws: Draws) -> np.ndarray:
    views = []
    for image, (h, w), (top, left), flip in zip(
        pixels.numpy(), draws["sizes"], draws["corner"] + view.padding, draws["flip"], strict=True
    ):
        short = min(h, w)
        target = [view.resized if side == short else int(view.resized * side / short) for side in (h, w)]
        padded = np.pad(resized(image[:h, :w], *target), [(view.padding,) * 2] * 2 + [(0, 0)], mode="reflect")
        crop = padded[top : top + view.size, left : left + view.size]
        assert crop.shape[:2] == (view.size, view.size)
        views.append((crop[:, ::-1] if flip else crop).transpose(2, 0, 1))
    return np.stack(views)


@pytest.mark.parametrize(
    "size, sizes",
    [
        (224, [(32, 32)]),
        (56, [(40, 30), (64, 64), (90, 200), (33, 50), (300, 128)]),  # resized to 64: smaller, equal, larger
        (56, [(64, 85), (100, 64), (64, 64)]),  # stored at the right size: only cropped
    ],
)
def test_weak_view_is_exactly_pillows(size: int, sizes: list[tuple[int, int]]) -> None:
    pixels, heights_widths = stored((sizes * 12)[:12])
    view = WeakView(size)
    draws = view.draw(np.random.default_rng(0), heights_widths)
    assert draws["flip"].any() and not draws["flip"].all() and (draws["corner"] < 0).any()
    assert np.array_equal(view.apply(pixels, draws).numpy(), weak_by_pillow(pixels, view, draws))


def test_weak_view_by_hand() -> None:
    """A row 0 … 7, crop of 8 from column -2: reflected on the left; then flipped."""
    pixels = torch.arange(8, dtype=torch.uint8).view(1, 1, 8, 1).expand(1, 8, 8, 3)
    view = WeakView(8, resize=1.0, padding=0.25)
    draws = view.draw(np.random.default_rng(0), np.array([[8, 8]]))
    draws |= {"corner": np.array([[0, -2]]), "flip": np.array([False])}
    assert view.apply(pixels, draws)[0, 0, 0].tolist() == [2, 1, 0, 1, 2, 3, 4, 5]
    assert view.apply(pixels, draws | {"flip": np.array([True])})[0, 0, 0].tolist() == [5, 4, 3, 2, 1, 0, 1, 2]


def test_weak_draws_cover_the_paper_ranges() -> None:
    view = WeakView(224)
    assert (view.resized, view.padding) == (256, 28)
    draws = view.draw(np.random.default_rng(0), np.tile([32, 48], (4000, 1)))
    assert draws["frame"][0].tolist() == [256, 384]
    assert draws["corner"].min(0).tolist() == [-28, -28]
    assert draws["corner"].max(0).tolist() == [256 + 28 - 224, 384 + 28 - 224]
    assert 0.46 < draws["flip"].mean() < 0.54
    assert not WeakView(224, flip=False).draw(np.random.default_rng(0), np.tile([32, 48], (99, 1)))["flip"].any()


def test_weak_view_refuses_a_crop_that_does_not_fit() -> None:
    with pytest.raises(FinesslError, match="padding"):
        WeakView(224, resize=0.5, padding=0.1)


def test_centre_view() -> None:
    pixels, sizes = stored([(16, 25), (30, 16)])
    view = CentreView(16)
    result = view.apply(pixels, view.draw(np.random.default_rng(0), sizes))
    assert torch.equal(result[0], pixels[0, :16, 4:20].permute(2, 0, 1))  # 4.5 rounds to the even 4
    assert torch.equal(result[1], pixels[1, 7:23, :16].permute(2, 0, 1))


def test_evaluation_view_squashes() -> None:
    pixels, sizes = stored([(40, 30), (32, 32), (50, 100)])
    result = evaluation_view(pixels, sizes, 48).permute(0, 2, 3, 1).numpy()
    for image, (h, w), view in zip(pixels.numpy(), sizes, result, strict=True):
        assert np.array_equal(view, resized(image[:h, :w], 48, 48))


def test_a_view_depends_on_its_draws_alone() -> None:
    """The same seed gives the same bits; the rows of a part of the batch give that part of the result."""
    pixels, sizes = stored([(32, 32)] * 10)
    weak, strong = WEAK["crop-flip"](64), STRONG["randaugment"](64)

    def view(rows: slice) -> Tensor:
        rng = np.random.default_rng([5, 1, 0])
        drawn, distorted = weak.draw(rng, sizes), strong.draw(rng, len(sizes))
        return strong.apply(weak.apply(pixels[rows], take(drawn, rows)), take(distorted, rows))

    whole = view(slice(None))
    assert torch.equal(view(slice(None)), whole)
    assert torch.equal(torch.cat([view(slice(0, 3)), view(slice(3, 10))]), whole)


SIZES = {
    "stored as they are used": [(48, 48), (48, 80), (64, 48)],  # one tap
    "smaller and larger": [(48, 48), (20, 33), (70, 55), (1, 9), (48, 200)],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("at_once", [2, 128])
def test_packed_images_give_the_same_views(
    sizes: list[tuple[int, int]], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pixel_ops, "PACKED", at_once)
    pixels, heights_and_widths = stored(sizes * 3)
    weak = WEAK["crop-flip"](42)
    assert weak.resized == 48
    drawn = weak.draw(np.random.default_rng(0), heights_and_widths)
    together = packed(pixels, heights_and_widths)
    assert torch.equal(weak.apply(together, drawn), weak.apply(pixels, drawn))
    expected = evaluation_view(pixels, heights_and_widths, 30)
    assert torch.equal(evaluation_view(together, heights_and_widths, 30), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kernels", [False, True])
def test_a_gpu_makes_the_same_bits_of_packed_images(
    sizes: list[tuple[int, int]], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr("finessl.runtime.triton.has_triton", lambda: False)
    weak = WEAK["crop-flip"](42)
    for count in (3, 5, 60):
        pixels, heights_and_widths = stored(sizes * count)
        drawn = weak.draw(np.random.default_rng(0), heights_and_widths)
        expected = weak.apply(pixels, drawn)
        on_gpu = packed(pixels, heights_and_widths, "cuda")
        weak.apply(on_gpu, drawn)  # may compile
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = weak.apply(on_gpu, drawn)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(result.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["randaugment", "randaugment-usb"])
def test_a_gpu_makes_the_same_bits_without_being_waited_for(policy: str) -> None:
    pixels, sizes = stored([(32, 32), (40, 64), (100, 90)] * 20)
    weak, strong = WEAK["crop-flip"](64), STRONG[policy](64)
    rng = np.random.default_rng(0)
    drawn, distorted = weak.draw(rng, sizes), strong.draw(rng, len(sizes))
    expected = strong.apply(weak.apply(pixels, drawn), distorted)
    on_gpu = pixels.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = strong.apply(weak.apply(on_gpu, drawn), distorted)
        normalise(result, (0.5,) * 3, (0.2,) * 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(result.cpu(), expected)


def test_every_registered_view_applies() -> None:
    pixels, sizes = stored([(36, 36)] * 4)
    for name in WEAK.names():
        weak = WEAK[name](32)
        images = weak.apply(pixels, weak.draw(np.random.default_rng(0), sizes))
        for policy in STRONG.names():
            strong = STRONG[policy](32)
            distorted = strong.apply(images, strong.draw(np.random.default_rng(0), 4))
            assert distorted.shape == (4, 3, 32, 32) and distorted.dtype == torch.uint8
            assert torch.equal(distorted, images) == (policy == "weak")


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_normalise(dtype: torch.dtype, tolerance: float) -> None:
    images = stored([(9, 7)] * 2)[0].permute(0, 3, 1, 2)
    mean, std = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    expected = (images.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    result = normalise(images, mean, std, dtype)
    assert result.dtype == dtype
    assert torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance)
