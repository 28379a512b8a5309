"""RandAugment of a batch against Pillow, one image at a time with the same draws; its draws against the released code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from finessl.data.randaugment import OPERATIONS, RandAugment, UniformRandAugment
from finessl.data.views import Draws

Picture = Image.Image


def pictures(n: int, size: int) -> Tensor:
    """Waves with some noise: every channel has a range, a mean and edges of its own."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:size, 0:size]
    waves = np.sin(x / rng.uniform(2, 20, (n, 3, 1, 1)) + y / rng.uniform(2, 20, (n, 3, 1, 1)))
    images = 128 + rng.uniform(20, 120, (n, 3, 1, 1)) * waves + rng.normal(0, 10, (n, 3, size, size))
    return torch.from_numpy(images.clip(0, 255).astype(np.uint8))


def operation_by_pillow(image: Picture, name: str, value: float) -> Picture:
    def transform(*coefficients: float) -> Picture:
        return image.transform(image.size, Image.Transform.AFFINE, coefficients)

    return {
        "identity": lambda: image,
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(value),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(value),
        "posterize": lambda: ImageOps.posterize(image, int(value)),
        "solarize": lambda: ImageOps.solarize(image, value),  # type: ignore[arg-type]
        "rotate": lambda: image.rotate(value),
        "shear_x": lambda: transform(1, value, 0, 0, 1, 0),
        "shear_y": lambda: transform(1, 0, 0, value, 1, 0),
        "translate_x": lambda: transform(1, 0, value, 0, 1, 0),
        "translate_y": lambda: transform(1, 0, 0, 0, 1, value),
        "saturation": lambda: ImageEnhance.Color(image).enhance(value),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(value),
    }[name]()


def strong_by_pillow(images: Tensor, draws: Draws, colour: tuple[int, int, int]) -> Tensor:
    views = []
    for array, names, values, (top, left, bottom, right) in zip(
        images.permute(0, 2, 3, 1).numpy(), draws["operation"], draws["value"], draws["box"], strict=True
    ):
        image = Image.fromarray(array)
        for name, value in zip(names, values, strict=True):
            image = operation_by_pillow(image, OPERATIONS[name], float(value))
        image = image.copy()
        ImageDraw.Draw(image).rectangle((left, top, right - 1, bottom - 1), colour)
        views.append(np.asarray(image))
    return torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("policy, size", [(RandAugment, 224), (RandAugment, 48), (UniformRandAugment, 64)])
def test_strong_view_is_exactly_pillows(policy: type[RandAugment], size: int) -> None:
    n = 96
    view = policy(size)
    draws = view.draw(np.random.default_rng(3), n)
    assert set(draws["operation"].flatten()) == set(range(14))
    images = pictures(n, size)
    before = images.clone()
    assert torch.equal(view.apply(images, draws), strong_by_pillow(images, draws, view.COLOUR))
    assert torch.equal(images, before)


def test_values_are_the_released_ones() -> None:
    """Every operation at every level, from the formulas of the released code."""
    level = np.arange(1, 10)
    factor = [0.09 * v + 0.05 for v in level]
    expected = {
        **dict.fromkeys(("brightness", "contrast", "saturation", "sharpness"), factor),
        "posterize": [4, 4, 5, 5, 6, 6, 6, 7, 7],
        "solarize": [231, 205, 180, 154, 128, 103, 77, 52, 26],
        "rotate": [-3, -6, -9, -12, -15, -18, -21, -24, -27],
        **dict.fromkeys(("shear_x", "shear_y"), [-0.03 * v for v in level]),
        **dict.fromkeys(("translate_x", "translate_y"), [-6, -13, -20, -26, -33, -40, -47, -53, -60]),
    }
    for name, values in expected.items():
        operation = np.full(9, OPERATIONS.index(name))
        assert RandAugment(224).value(operation, level, -np.ones(9)) == pytest.approx(values), name


def test_draws_have_the_released_distribution() -> None:
    n = 20000
    draws = RandAugment(224).draw(np.random.default_rng(0), n)
    share = np.bincount(draws["operation"].flatten(), minlength=14) / (2 * n)
    assert share[0] == pytest.approx(0.5 + 0.5 / 14, abs=0.01)  # not done, or identity
    assert share[1:] == pytest.approx(np.full(13, 0.5 / 14), abs=0.004)
    rotation = draws["value"][draws["operation"] == OPERATIONS.index("rotate")]
    assert set(rotation) == {s * 3 * v for v in range(1, 10) for s in (-1, 1)}
    both = (draws["operation"] > 0).mean(0)
    assert both == pytest.approx([both.mean()] * 2, abs=0.01)


def test_cutout_by_hand() -> None:
    """16 pixels at 224, drawn as 17 because the far edge is included; pushed in at 0, cut off at the far border."""
    view = RandAugment(224)
    centre = np.array([[100.5, 50.2], [3.0, 220.9]])
    assert view.box(centre, np.full((2, 1), 16)).tolist() == [[92, 42, 109, 59], [0, 212, 17, 225]]
    assert (RandAugment(224).cutout, RandAugment(32).cutout, RandAugment(32, cutout=5).cutout) == (16, 2, 5)
    assert RandAugment(96, cutout=0.25).cutout == 24


def test_no_operations_and_no_cutout_leave_the_images() -> None:
    images = pictures(3, 20)
    view = RandAugment(20, ops=0, cutout=0)
    assert torch.equal(view.apply(images, view.draw(np.random.default_rng(0), 3)), images)


def test_uniform_draws_stay_in_their_ranges() -> None:
    draws = UniformRandAugment(100).draw(np.random.default_rng(0), 20000)
    ranges = {"brightness": (0.05, 0.95), "posterize": (4, 8), "rotate": (-30, 30), "shear_y": (-0.3, 0.3)}
    for name, (low, high) in (ranges | {"solarize": (0, 256), "translate_x": (-30, 30)}).items():
        values = draws["value"][draws["operation"] == OPERATIONS.index(name)]
        assert (values.min(), values.max()) == pytest.approx((low, high), abs=0.01 * (high - low))
    sides = draws["box"][:, 2] - draws["box"][:, 0]
    assert sides.max() in (50, 51) and sides.min() <= 1
    assert (draws["operation"] == 0).mean() == pytest.approx(1 / 14, abs=0.01)
