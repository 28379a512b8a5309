"""Each image operation against Pillow's own, on the same parameters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import PIL
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from finessl.data import pixel_ops as ops
from finessl.data.decoding import resize

Picture = Image.Image
LEVELS = np.arange(1, 10)  # the magnitudes of RandAugment
FACTORS = 0.09 * LEVELS + 0.05


def pictures(n: int, height: int = 41, width: int = 56, seed: int = 0) -> Tensor:
    """Smooth images with some noise and a few flat ones: histograms with gaps, ranges below 0 … 255, constants."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = np.sin(x / rng.uniform(3, 30, (n, 3, 1, 1)) + y / rng.uniform(3, 30, (n, 3, 1, 1)))
    noise = rng.normal(0, 12, (n, 3, height, width))
    images = 128 + rng.uniform(5, 130, (n, 3, 1, 1)) * waves + noise
    images[0] = rng.integers(0, 256, (3, height, width))
    images[-1, 0] = 77
    images[-1, 1] = np.where(x < 2, 3, 200)
    return torch.from_numpy(images.clip(0, 255).astype(np.uint8))


def to_pil(image: Tensor) -> Picture:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def by_pillow(images: Tensor, change: Callable[..., Picture], *values: np.ndarray) -> Tensor:
    done = [np.asarray(change(to_pil(image), *row)) for image, *row in zip(images, *values, strict=True)]
    return torch.from_numpy(np.stack(done)).permute(0, 3, 1, 2)


def table(tables: np.ndarray) -> Tensor:
    return torch.from_numpy(tables)[:, None].repeat(1, 3, 1)


def floats(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def test_brightness() -> None:
    images = pictures(9)
    expected = by_pillow(images, lambda image, f: ImageEnhance.Brightness(image).enhance(f), FACTORS)
    assert torch.equal(ops.lookup(images, table(ops.brightness_tables(FACTORS))), expected)


def test_contrast() -> None:
    images = pictures(9)
    expected = by_pillow(images, lambda image, f: ImageEnhance.Contrast(image).enhance(f), FACTORS)
    assert torch.equal(ops.lookup(images, ops.contrast_tables(images, floats(FACTORS))), expected)


def test_saturation() -> None:
    images = pictures(9)
    expected = by_pillow(images, lambda image, f: ImageEnhance.Color(image).enhance(f), FACTORS)
    assert torch.equal(ops.saturation(images, floats(FACTORS)), expected)


@pytest.mark.parametrize("shape", [(41, 56), (3, 3), (2, 9), (1, 1)])
def test_sharpness(shape: tuple[int, int]) -> None:
    images = pictures(9, *shape)
    expected = by_pillow(images, lambda image, f: ImageEnhance.Sharpness(image).enhance(f), FACTORS)
    assert torch.equal(ops.sharpness(images, floats(FACTORS)), expected)


def test_autocontrast() -> None:
    images = pictures(40)
    expected = by_pillow(images, ImageOps.autocontrast)
    assert torch.equal(ops.lookup(images, ops.autocontrast_tables(images)), expected)


@pytest.mark.parametrize("low", [0, 1, 50])
def test_autocontrast_of_every_range(low: int) -> None:
    """Where levels fall on integers, Pillow's float64 decides: every width of the range."""
    images = torch.zeros(256 - low, 3, 16, 16, dtype=torch.uint8)
    for i in range(256 - low):
        images[i] = (torch.arange(256).view(16, 16) % (i + 1) + low).to(torch.uint8)
    expected = by_pillow(images, ImageOps.autocontrast)
    assert torch.equal(ops.lookup(images, ops.autocontrast_tables(images)), expected)


@pytest.mark.parametrize("shape", [(41, 56), (24, 18), (5, 3)])
def test_equalize(shape: tuple[int, int]) -> None:
    """Small images too: with few pixels the step is 1 or 0, and Pillow clips or leaves the channel."""
    images = pictures(20, *shape)
    expected = by_pillow(images, ImageOps.equalize)
    assert torch.equal(ops.lookup(images, ops.equalize_tables(images)), expected)


def test_posterize() -> None:
    images, bits = pictures(8), np.arange(1, 9)
    expected = by_pillow(images, lambda image, b: ImageOps.posterize(image, int(b)), bits)
    assert torch.equal(ops.lookup(images, table(ops.posterize_tables(bits))), expected)


def test_solarize() -> None:
    images, thresholds = pictures(11), np.append(256 - np.trunc(25.6 * LEVELS), [0, 99.5])
    expected = by_pillow(images, ImageOps.solarize, thresholds)
    assert torch.equal(ops.lookup(images, table(ops.solarize_tables(thresholds))), expected)


@pytest.mark.parametrize("shape", [(224, 224), (41, 56)])
def test_rotation(shape: tuple[int, int]) -> None:
    degrees = np.concatenate([3 * LEVELS, -3 * LEVELS, [0.73, -29.11]]).astype(float)
    images = pictures(len(degrees), *shape)
    expected = by_pillow(images, lambda image, d: image.rotate(d), degrees)
    matrix = torch.from_numpy(ops.affine_matrix(ops.rotation(degrees, *shape)))
    assert torch.equal(ops.affine(images, matrix), expected)


@pytest.mark.parametrize("entry, unit", [(1, 0.03), (3, 0.03), (2, 6), (5, 6), (2, 0.77), (5, 0.77)])
def test_shear_and_translation(entry: int, unit: float) -> None:
    """Entries of the map: 1 and 3 the slopes, 2 and 5 the shifts (fractions of pixels too)."""
    coefficients = np.tile(np.array([1.0, 0, 0, 0, 1, 0]), (18, 1))
    coefficients[:, entry] = unit * np.concatenate([LEVELS, -LEVELS])
    images = pictures(18)
    expected = by_pillow(
        images, lambda image, *c: image.transform(image.size, Image.Transform.AFFINE, c), *coefficients.T
    )
    assert torch.equal(ops.affine(images, torch.from_numpy(ops.affine_matrix(coefficients))), expected)


def test_fill_paints_the_box_only() -> None:
    images = pictures(2, 20, 30)
    boxes = np.array([[2, 3, 6, 9], [15, 0, 25, 4]])

    def painted(image: Picture, top: int, left: int, bottom: int, right: int) -> Picture:
        ImageDraw.Draw(image).rectangle((left, top, right - 1, bottom - 1), (1, 2, 3))
        return image

    expected = by_pillow(images, painted, *boxes.T)
    result = ops.fill(images, torch.from_numpy(boxes), torch.tensor([1, 2, 3], dtype=torch.uint8))
    assert torch.equal(result, expected)


def test_reflect_by_hand() -> None:
    positions = np.arange(-4, 7)
    assert ops.reflect(positions, np.array(4)).tolist() == [2, 3, 2, 1, 0, 1, 2, 3, 2, 1, 0]
    assert ops.reflect(positions, np.array(1)).tolist() == [0] * 11


def axis(source: list[int], resized: int) -> ops.Axis:
    position = np.broadcast_to(np.arange(resized), (len(source), resized))
    return ops.Axis(position, np.full(len(source), resized), np.array(source))


@pytest.mark.parametrize("size", [24, 56, 97, 224])
def test_resample_resizes_like_pillow(size: int) -> None:
    """Images of different sizes in one padded batch, some enlarged and some shrunk.

    `resize` is what predict uses: with any release of Pillow both run the horizontal pass first. Pillow itself runs the
    vertical one first for some tall images since release 13.
    """
    heights, widths = [32, 57, 97, 200, 1, 120], [32, 97, 40, 1, 150, 40]
    pixels = torch.full((6, 200, 150, 3), 255, dtype=torch.uint8)
    for i, (height, width) in enumerate(zip(heights, widths, strict=True)):
        pixels[i, :height, :width] = pictures(2, height, width, seed=i)[0].permute(1, 2, 0)
    result = ops.resample(pixels, axis(heights, size), axis(widths, size))
    bilinear, differ = Image.Resampling.BILINEAR, 0
    for i, (height, width) in enumerate(zip(heights, widths, strict=True)):
        source = Image.fromarray(pixels[i, :height, :width].numpy())
        expected = np.asarray(source.resize((size, height), bilinear).resize((size, size), bilinear))
        assert np.array_equal(result[i].permute(1, 2, 0).numpy(), expected)
        assert np.array_equal(np.asarray(resize(source, size, size)), expected)
        at_once = np.asarray(source.resize((size, size), bilinear)).astype(int)
        assert np.abs(at_once - expected).max() <= 1
        differ += not np.array_equal(at_once, expected)
    assert differ == 0 or int(PIL.__version__.partition(".")[0]) >= 13


def test_resample_without_resizing_copies_pixels() -> None:
    images = pictures(3, 20, 20)
    assert len(ops.taps(20, 20)[0]) == 1  # no arithmetic
    assert torch.equal(ops.resample(images.permute(0, 2, 3, 1), axis([20] * 3, 20), axis([20] * 3, 20)), images)
