"""Every flavour of image file becomes upright 8-bit RGB; what cannot, says why."""

from __future__ import annotations

import io
import os
import socket
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

import finessl
from finessl.data.decoding import ImageError, decode, fitted, pillow_warnings, probe, resize, to_rgb
from finessl.data.images import ArrayImages, FileImages
from finessl.data.path_table import PathTable
from finessl.errors import FinesslError


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def png(values: np.ndarray, bits: int, colour: int) -> bytes:
    """A PNG of any depth, written by hand: Pillow writes no 16-bit RGB."""
    height, width = values.shape[:2]

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = b"".join(b"\0" + row.astype(">u2" if bits == 16 else "u1").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def smooth(height: int, width: int) -> Image.Image:
    """A photo-like picture: gradients and a few shapes."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * y / height, 255 * x / width, 127 + 100 * np.sin(y / 40 + x / 60)], -1).astype(np.uint8)
    image = Image.fromarray(pixels)
    ImageDraw.Draw(image).ellipse((width * 0.2, height * 0.3, width * 0.6, height * 0.8), fill=(200, 30, 60))
    return image


def test_rgb_from_bytes_path_and_open_file(tmp_path: Path, make) -> None:
    pixels = make.picture(1, 5, 7)
    (tmp_path / "a.png").write_bytes(encoded(Image.fromarray(pixels)))
    for source in (encoded(Image.fromarray(pixels)), tmp_path / "a.png", str(tmp_path / "a.png")):
        assert (decode(source) == pixels).all()
    with open(tmp_path / "a.png", "rb") as file:
        assert (decode(file) == pixels).all()
    assert probe(tmp_path / "a.png") == (5, 7)


def test_grey_and_one_bit() -> None:
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    assert (decode(encoded(Image.fromarray(grey))) == grey[..., None]).all()
    bits = np.array([[True, False], [False, True]])
    assert (decode(encoded(Image.fromarray(bits))) == np.where(bits, 255, 0)[..., None]).all()


def test_palette_with_and_without_transparency() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([0, 1])
    assert decode(encoded(image)).tolist() == [[[10, 20, 30], [200, 100, 50]]]
    assert decode(encoded(image, transparency=0)).tolist() == [[[255, 255, 255], [200, 100, 50]]]
    assert decode(encoded(image, "GIF")).tolist() == [[[10, 20, 30], [200, 100, 50]]]


def test_alpha_is_laid_on_white() -> None:
    rgba = np.array([[[100, 0, 200, 255], [100, 0, 200, 0], [100, 0, 200, 128]]], np.uint8)
    half = [round(255 + (c - 255) * 128 / 255) for c in (100, 0, 200)]
    out = decode(encoded(Image.fromarray(rgba)))
    assert out[0, 0].tolist() == [100, 0, 200] and out[0, 1].tolist() == [255, 255, 255]
    assert np.abs(out[0, 2].astype(int) - half).max() <= 1
    grey_alpha = np.array([[[50, 255], [50, 0]]], np.uint8)
    assert decode(encoded(Image.fromarray(grey_alpha, "LA"))).tolist() == [[[50] * 3, [255] * 3]]
    keyed = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))  # RGB with one transparent colour
    assert decode(encoded(keyed, transparency=(4, 5, 6))).tolist() == [[[1, 2, 3], [255, 255, 255]]]


def test_cmyk() -> None:
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))  # red ink
    out = decode(encoded(image, "JPEG", quality=95)).astype(int)
    assert out.shape == (8, 8, 3) and (np.abs(out - [255, 0, 0]) <= 3).all()


def test_16_bit_keeps_the_high_byte() -> None:
    deep = np.array([[0, 255, 256], [32768, 40000, 65535]])
    expected = deep // 256
    assert (decode(png(deep, 16, 0)) == expected[..., None]).all()
    rgb = np.stack([deep, deep[::-1], deep], -1)
    assert (decode(png(rgb, 16, 2)) == rgb // 256).all()
    assert (decode(encoded(Image.fromarray(deep.astype(np.uint16)), "TIFF")) == expected[..., None]).all()
    assert (decode(encoded(Image.fromarray(deep.astype(np.int32)), "TIFF")) == expected[..., None]).all()


def test_12_bit_data_in_16_bit_files() -> None:
    """By what the file says, or by the values: else cameras' and microscopes' images are nearly black."""
    values = np.array([[0, 16, 1000], [2048, 4000, 4095]], np.uint16)
    image = Image.fromarray(values)
    assert (decode(png(values, 16, 0)) == (values >> 4)[..., None]).all()
    assert (decode(encoded(image, "TIFF")) == (values >> 4)[..., None]).all()
    assert (decode(encoded(image, "TIFF", tiffinfo={281: 65535})) == (values >> 8)[..., None]).all()
    assert (decode(encoded(image, "TIFF", tiffinfo={281: 16383})) == (values >> 6)[..., None]).all()
    assert (decode(encoded(image, "TIFF", tiffinfo={281: 1023})) == (values >> 4)[..., None]).all()  # the file is wrong
    rotated = encoded(image, "TIFF", tiffinfo={281: 16383, 274: 3})
    assert (decode(rotated) == (values >> 6)[::-1, ::-1, None]).all()


def test_floats_and_wide_integers_by_their_range() -> None:
    def tiff(values: list[float], kind: type) -> list[int]:
        return decode(encoded(Image.fromarray(np.array([values], kind)), "TIFF"))[0, :, 0].tolist()

    assert tiff([0.0, 0.5, 1.0], np.float32) == [0, 128, 255]  # 127.5 rounds to even
    assert tiff([0.0, 100.0, 255.0], np.float32) == [0, 100, 255]
    assert tiff([-10.0, 0.0, 10.0], np.float32) == [0, 128, 255]
    assert tiff([0, 1, 1], np.int32) == [0, 1, 1]
    assert tiff([0, 10**6, 2 * 10**6], np.int32) == [0, 128, 255]
    assert tiff([float("nan"), 3.0, 5.0], np.float32) == [0, 3, 5]
    assert tiff([-3.0, -3.0], np.float32) == [0, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
def test_exif_rotation(orientation: int, format: str) -> None:
    """The file holds what the camera saw; its tag says how to turn it. Worked out with NumPy."""
    upright = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 14
    seen = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: np.rot90(upright, -1),
    }[orientation]
    image = Image.fromarray(np.ascontiguousarray(seen))
    exif = image.getexif()
    exif[0x0112] = orientation
    options = {"lossless": True} if format == "WEBP" else {}
    assert (decode(encoded(image, format, exif=exif, **options)) == upright).all()


def test_unreadable_exif_does_not_spoil_the_image() -> None:
    pixels = np.full((4, 4, 3), 9, np.uint8)
    assert (decode(encoded(Image.fromarray(pixels), "PNG", exif=b"Exif\0\0garbage")) == pixels).all()


def test_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for format, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
        assert (decode(data) == [255, 0, 0]).all(), format


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF"])
def test_truncated(format: str, make) -> None:
    data = encoded(Image.fromarray(make.picture(0, 64, 64)), format)
    with pytest.raises(ImageError, match="broken|not an image"):
        decode(data[: len(data) // 2])


def test_what_is_no_image_says_so(tmp_path: Path) -> None:
    for content, reason in ((b"", r"0 bytes"), (b"hello" * 100, "not an image")):
        (tmp_path / "x.jpg").write_bytes(content)
        for source in (content, tmp_path / "x.jpg"):
            for function in (decode, probe):
                with pytest.raises(ImageError, match=reason):
                    function(source)
    (tmp_path / "link.jpg").symlink_to(tmp_path / "nowhere.jpg")
    with pytest.raises(ImageError, match="no such file"):
        decode(tmp_path / "link.jpg")
    with pytest.raises(ImageError, match="a folder, not a file"):
        decode(tmp_path)  # a folder named like an image


def test_formats_that_start_programs_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow opens EPS under any file name and starts Ghostscript."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    (tmp_path / "photo.jpg").write_bytes(encoded(Image.new("RGB", (8, 8)), "EPS"))
    for source in (tmp_path / "photo.jpg", (tmp_path / "photo.jpg").read_bytes()):
        with pytest.raises(ImageError, match=r"not an image in a known format \(JPEG, PNG"):
            decode(source)
    for extension in (".tga", ".psd", ".CR2"):
        (tmp_path / f"a{extension}").write_bytes(b"x")
        with pytest.raises(ImageError, match=f"{extension.lower()} is not read; convert it to JPEG or PNG"):
            decode(tmp_path / f"a{extension}")


def test_images_are_opened_in_one_place() -> None:
    """With the list of formats; what an export writes for users is theirs."""
    package = Path(finessl.__file__).parent
    callers = [p for p in package.rglob("*.py") if "Image.open(" in p.read_text(encoding="utf-8")]
    assert {p.name for p in callers if "inference" not in p.parts} == {"decoding.py"}


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """Reading a pipe or a device named like an image would never end."""
    os.mkfifo(tmp_path / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket.jpg"))
    (tmp_path / "device.jpg").symlink_to("/dev/zero")
    for name in ("pipe.jpg", "socket.jpg", "device.jpg"):
        for function in (decode, probe):
            with pytest.raises(ImageError, match="not a regular file"):
                function(tmp_path / name)


def test_pillows_warnings_are_collected_by_image(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    pixels = Image.new("RGB", (4, 4))
    damaged = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01\x03\0\x01\0\0\0\x06\0"
    names = [str(tmp_path / name) for name in ("a.jpg", "b.jpg", "good.jpg")]
    for name in names:
        pixels.save(name, **({} if "good" in name else {"exif": damaged}))
    with pillow_warnings() as found, ThreadPoolExecutor(2) as pool:
        list(pool.map(decode, names))
    assert sorted(found) == names[:2] and "EXIF" in found[names[0]] and not recwarn.list


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_decompression_bombs_are_refused(monkeypatch: pytest.MonkeyPatch, make) -> None:
    """Pillow only warns up to twice its limit; neither that nor beyond is decoded here."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for side in (11, 30):
        with pytest.raises(ImageError, match="bomb"):
            decode(encoded(Image.fromarray(make.picture(0, side, side))))
    assert decode(encoded(Image.fromarray(make.picture(0, 10, 10)))).shape == (10, 10, 3)


def test_sizes_follow_torchvision() -> None:
    assert fitted(300, 400, shorter=256) == (256, 341)  # int(256 · 400 / 300)
    assert fitted(400, 300, shorter=256) == (341, 256)
    assert fitted(1000, 257, shorter=256) == (996, 256)
    assert fitted(32, 32, shorter=256) == (32, 32)  # never larger
    assert fitted(255, 999, shorter=256) == (255, 999)
    assert fitted(300, 400, square=224) == (224, 224)
    assert fitted(100, 300, square=224) == (224, 224)
    assert fitted(100, 224, square=224) == (100, 224)


def test_very_long_images_are_squashed() -> None:
    """A batch takes the memory of its tallest times its widest image."""
    assert fitted(20_000, 20, shorter=256) == (1024, 20) and fitted(20, 20_000, shorter=256) == (20, 1024)
    assert fitted(4000, 1000, shorter=256) == (1024, 256) and fitted(4100, 1000, shorter=256) == (1024, 256)
    strip = encoded(Image.new("RGB", (3000, 4), "red"))
    assert decode(strip, shorter=16).shape == (4, 64, 3) and (decode(strip, shorter=16) == [255, 0, 0]).all()


def test_resized_exactly_as_torchvision() -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    image = smooth(331, 517)
    data = encoded(image)
    assert (decode(data, shorter=256) == np.asarray(transforms.Resize(256)(image))).all()
    assert (decode(data, square=224) == np.asarray(transforms.Resize((224, 224))(image))).all()


@pytest.mark.parametrize("height, width", [(1203, 1601), (1601, 1203), (1501, 1502)])
@pytest.mark.parametrize("orientation", [1, 6])
def test_large_jpegs_are_shrunk_while_decoding(height: int, width: int, orientation: int) -> None:
    """As good as a full decode, and of the very size that the header promises (the store relies on it)."""
    image = smooth(height, width)
    exif = image.getexif()
    exif[0x0112] = orientation
    data = encoded(image, "JPEG", quality=95, exif=exif)
    full = to_rgb(Image.open(io.BytesIO(data)))
    for options in ({"shorter": 128}, {"square": 112}):
        quick = decode(data, **options)
        size = fitted(full.height, full.width, **options)
        exact = np.asarray(full.resize((size[1], size[0]), Image.Resampling.BILINEAR))
        assert quick.shape == exact.shape == (*size, 3)
        assert np.abs(quick.astype(int) - exact).mean() < 1


@pytest.mark.parametrize("height, width", [(1501, 403), (403, 1501), (700, 690)])
def test_resizing_a_part_of_an_image(height: int, width: int) -> None:
    """Across, then down: with any release of Pillow as before its release 13."""
    image, bilinear = smooth(height, width), Image.Resampling.BILINEAR
    box = (3.5, 7.25, width - 1.5, height - 20.0)
    across = image.resize((90, height), bilinear, (box[0], 0, box[2], height))
    expected = across.resize((90, 100), bilinear, (0, box[1], 90, box[3]))
    assert (np.asarray(resize(image, 100, 90, box)) == np.asarray(expected)).all()


def test_array_images(make) -> None:
    array = np.stack([make.picture(i, 6, 4) for i in range(5)])
    images = ArrayImages(array, "train")
    assert len(images) == 5 and images.key(3) == "train/3" and images.size(0) == (6, 4)
    assert np.shares_memory(images.read(2), array)
    assert images.read(2, shorter=2).shape == (3, 2, 3)
    taken = images.take(np.array([4, 1]))
    assert taken.key(0) == "train/4" and (taken.read(1) == array[1]).all()
    assert images.fingerprint() == ArrayImages(array.copy()).fingerprint() != taken.fingerprint()
    with pytest.raises(FinesslError, match=r"float64 \[5, 6, 4, 3\]"):
        ArrayImages(array.astype(float))


def test_file_images(tmp_path: Path, make) -> None:
    names = ["a/1.png", "a/2.png", "b/1.png", "top.png"]
    for i, name in enumerate(names):
        make.write(tmp_path / name, i)
    sizes = [(tmp_path / name).stat().st_size for name in names]
    images = FileImages(tmp_path, PathTable.of(names, sizes))
    assert [images.key(i) for i in range(4)] == names
    assert (images.read(2) == make.picture(2)).all()
    taken = images.take(np.array([3, 0]))
    assert [taken.key(i) for i in range(2)] == ["top.png", "a/1.png"] and (taken.read(0) == make.picture(3)).all()


def test_path_table_takes_and_fingerprints() -> None:
    names = [f"{'ab'[i % 2]}/bild-{'x' * (i % 7)}ü{i}.jpg" for i in range(50)] + ["loose.jpg"]
    table = PathTable.of(names, range(51))
    for indices in (np.arange(10, 20), np.array([50, 3, 3, 17]), np.empty(0, np.int64), np.arange(51)[::-1]):
        taken = table.take(indices)
        assert [taken[i] for i in range(len(taken))] == [names[i] for i in indices]
        assert taken.sizes.tolist() == indices.tolist()
        # The fingerprint is of the content, not of how the table came about.
        assert taken.fingerprint() == PathTable.of([names[i] for i in indices], indices).fingerprint()
    prints = {table.fingerprint(), PathTable.of(names, range(1, 52)).fingerprint()}
    prints |= {PathTable.of([*names[:-1], "loose.jpe"], range(51)).fingerprint()}
    prints |= {PathTable.of(["b" + names[0][1:], *names[1:]], range(51)).fingerprint()}
    assert len(prints) == 4
