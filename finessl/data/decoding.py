"""Image files as arrays: uint8 RGB, upright, from every supported format; or an ImageError with the reason."""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from finessl.errors import FinesslError

Source = str | os.PathLike[str] | bytes | BinaryIO

# Formats that are read. Pillow's others are refused: some start external programs (EPS starts Ghostscript), others are rare
# and little tested. JPEG includes MPO; HEIC needs the package pillow-heif.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "AVIF", "HEIF")
HEIC = frozenset({".heic", ".heif", ".hif"})
# fmt: off
EXTENSIONS = frozenset({
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".bmp", ".dib", ".gif", ".tif", ".tiff", ".ppm", ".pgm",
    ".pbm", ".pnm", ".pfm", ".avif",
}) | (HEIC if importlib.util.find_spec("pillow_heif") else frozenset())
# Images in other formats: a message says that they are left out.
UNREAD = (HEIC - EXTENSIONS) | {
    ".jp2", ".j2k", ".jpx", ".tga", ".ico", ".pcx", ".qoi", ".sgi", ".dds", ".xbm", ".eps", ".svg", ".psd", ".jxl",
    ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2",
}
# fmt: on
MAX_ASPECT = 4  # of the longer side to `shorter`; a longer side is squashed
ORIENTATION = 0x0112  # EXIF tag; UPRIGHT: value → transposition that undoes it
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(FinesslError):
    """An image cannot be used; the message is the reason."""


def decode(source: Source, *, shorter: int | None = None, square: int | None = None) -> np.ndarray:
    """uint8 [h, w, 3] of an image file, its bytes or an open file.   shorter, square: as in `fitted`."""
    return np.asarray(load(source, shorter=shorter, square=square))


def load(source: Source, *, shorter: int | None = None, square: int | None = None) -> Image.Image:
    """`decode` as an RGB Pillow image.

    A JPEG at least four times larger than requested is first reduced by its decoder, to at least twice the requested size:
    several times faster, and after the bilinear step the mean difference is below one grey level.
    """
    with opened(source) as image:
        return shrunk(image, shorter, square)


def shrunk(image: Image.Image, shorter: int | None = None, square: int | None = None) -> Image.Image:
    """`load` for an image from `opened`."""
    height, width = fitted(image.height, image.width, shorter=shorter, square=square)
    stored = image.size
    draft = image.draft(None, (2 * width, 2 * height)) if shorter or square else None
    image.load()
    if draft and image.size != stored:  # the decoder rounds the size up; the box is the part that the image covers
        image = resize(image, height, width, draft[1])
    image = to_rgb(image)
    if (image.height < image.width) != (height < width):  # EXIF rotation swapped the sides
        height, width = width, height
    return resize(image, height, width)


def probe(source: Source) -> tuple[int, int]:
    """(height, width) from the header, before EXIF rotation."""
    with opened(source) as image:
        return image.height, image.width


def fitted(height: int, width: int, *, shorter: int | None = None, square: int | None = None) -> tuple[int, int]:
    """Size of an image in the store: the shorter side reduced to `shorter` (as torchvision's Resize), or the image squashed to
    `square` × `square`; pixels.

    Small images keep their size and are enlarged on the device. A side over MAX_ASPECT · `shorter` is squashed to that, because
    a batch needs the memory of its tallest times its widest image.
    """
    if square:
        return (square, square) if max(height, width) > square else (height, width)
    short, long = sorted((height, width))
    if not shorter:
        return height, width
    if short > shorter:
        short, long = shorter, int(shorter * long / short)
    long = min(long, MAX_ASPECT * shorter)
    return (short, long) if height <= width else (long, short)


def resize(
    image: Image.Image, height: int, width: int, box: tuple[float, float, float, float] | None = None
) -> Image.Image:
    """Pillow's bilinear resize, always horizontally first, each pass rounded to bytes (as `pixel_ops.resample`).

    Pillow 13 and later start with the vertical pass for some tall images, which changes about a quarter of the pixels by one
    level. Two calls keep the order.   box: the part of the image to resize.
    """
    if (width, height) == image.size and box is None:
        return image
    left, top, right, bottom = box or (0, 0, *image.size)
    if image.height - height <= max(2 * (image.width - width), 0):  # Pillow's rule
        return image.resize((width, height), Image.Resampling.BILINEAR, (left, top, right, bottom))
    across = image.resize((width, image.height), Image.Resampling.BILINEAR, (left, 0, right, image.height))
    return across.resize((width, height), Image.Resampling.BILINEAR, (0, top, width, bottom))


def squash(image: np.ndarray, size: int) -> np.ndarray:
    """The whole image resized to size × size, as in evaluation."""
    return image if image.shape[:2] == (size, size) else np.asarray(resize(Image.fromarray(image), size, size))


@functools.cache
def formats() -> tuple[str, ...]:
    """Those of FORMATS that this installation reads."""
    Image.init()
    if HEIC <= EXTENSIONS:
        with suppress(ImportError):  # the library may fail to load: HEIC files are then unreadable
            import pillow_heif

            pillow_heif.register_heif_opener()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def unread_reason(name: str | os.PathLike[str]) -> str:
    """Why a file of this name is not read."""
    extension = Path(name).suffix.lower()
    if extension in HEIC - EXTENSIONS:
        return "HEIC needs pillow-heif: pip install 'finessl[heic]'"
    if extension in UNREAD:
        return f"{extension} is not read; convert it to JPEG or PNG"
    return f"not an image in a known format ({', '.join(formats())})"


@contextmanager
def opened(source: Source, name: str = "") -> Iterator[Image.Image]:
    """An image whose header has been read. Every failure, also within the block, is an ImageError.

    Pillow warns above its limit for decompression bombs; here that is an error.   name: of bytes or an open file.
    """
    file: BinaryIO | None = None
    name = os.fsdecode(source) if isinstance(source, (str, os.PathLike)) else name
    _current.name = name
    try:
        if isinstance(source, (str, os.PathLike)):
            file = open_regular(source)
        with Image.open(
            io.BytesIO(source) if isinstance(source, bytes) else file or source, formats=formats()
        ) as image:
            limit = Image.MAX_IMAGE_PIXELS
            if limit and image.width * image.height > limit:
                raise ImageError(
                    f"{image.width}×{image.height} pixels, over the limit of {limit:,} (a decompression bomb?); "
                    "shrink the file, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
                )
            yield image
    except Image.UnidentifiedImageError as error:
        content = file or source
        size = len(content) if isinstance(content, bytes) else content.seek(0, io.SEEK_END)  # type: ignore[union-attr]
        raise ImageError(unread_reason(name) if size else "empty file (0 bytes)") from error
    except Exception as error:  # Pillow's plugins raise anything on bytes they did not expect
        raise reason_of(error) from error
    finally:
        _current.name = ""
        if file is not None:
            file.close()


_current = threading.local()  # .name: the image that this thread decodes


@contextmanager
def pillow_warnings() -> Iterator[dict[str, str]]:
    """Collect Pillow's warnings (of damaged EXIF data, for example) by image instead of printing them, in all threads."""
    found: dict[str, str] = {}

    def collect(message: Warning | str, category: type[Warning], filename: str, *more: object, **named: object) -> None:
        if f"{os.sep}PIL{os.sep}" in filename:
            found.setdefault(getattr(_current, "name", ""), str(message))
        else:
            show(message, category, filename, *more, **named)  # type: ignore[arg-type]

    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.showwarning = collect
        warnings.filterwarnings("always", module=r"PIL\.")
        yield found


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow image as 8-bit RGB, upright, transparent parts white."""
    deep = image.mode in ("I", "F") or image.mode.startswith("I;16")
    declared = declared_range(image) if deep else 0
    try:
        rotation = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # with unreadable metadata the pixels can still be used
        rotation = None
    if rotation is not None:
        image = image.transpose(rotation)
    if deep:
        image = Image.fromarray(_eight_bits(np.asarray(image), declared))
    elif "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def declared_range(image: Image.Image) -> int:
    """The largest pixel value that a TIFF file declares; 0 without one."""
    tags = getattr(image, "tag_v2", {})
    try:
        bits = int(np.ravel(tags.get(258, 16))[0])  # BitsPerSample
        return int(np.ravel(tags.get(281, 0 if bits >= 16 else (1 << bits) - 1))[0])  # MaxSampleValue
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0


def _eight_bits(values: np.ndarray, declared: int) -> np.ndarray:
    """Grey values of more than 8 bits, as 8 bits.

    Integers of up to 16 bits: the highest 8 of the bits that the file declares (`declared`); otherwise of 12 bits if all
    values of the image fit in 12 (as of cameras and microscopes), else of 16. Other values: scaled by their range.
    """
    integers = values.dtype.itemsize == 2
    if not integers:
        values = np.nan_to_num(values.astype(np.float64))
    low, high = float(values.min()), float(values.max())
    if integers or (low >= 0 and 255 < high <= 65535):
        used = max(declared, int(high)) if 255 < declared < 65536 else 4095 if high <= 4095 else 65535
        return (values.astype(np.uint16) >> (used.bit_length() - 8)).astype(np.uint8)
    if low < 0 or high > 65535:
        values = (values - low) / max(high - low, 1e-9) * 255
    elif high <= 1 and not (values == np.floor(values)).all():  # floats in [0, 1]
        values = values * 255
    return values.round().astype(np.uint8)


def to_bytes(values: np.ndarray, what: str) -> np.ndarray:
    """uint8 from floats in 0…1 or integers in 0…255.   what: name of the array in an error."""
    if values.dtype == np.uint8:
        return values
    floats = np.issubdtype(values.dtype, np.floating)
    if values.size and not (values.min() >= 0 and values.max() <= (1 if floats else 255)):  # NaN is neither
        wrong = "floats outside 0…1" if floats else f"{values.dtype} values outside 0…255"
        raise FinesslError(f"{what} holds {wrong}; pass uint8, or floats between 0 and 1.")
    return (values * 255).round().astype(np.uint8) if floats else values.astype(np.uint8)


def reason_of(error: Exception) -> ImageError:
    if isinstance(error, ImageError):
        return error
    if isinstance(error, Image.DecompressionBombError):
        return ImageError(f"refused as a decompression bomb: {error}")
    if isinstance(error, FileNotFoundError):
        return ImageError("there is no such file (a broken link?)")
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ImageError(f"broken: {text or type(error).__name__}")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading; ImageError for a pipe, a socket or a device, which could block forever."""
    kind = os.stat(path).st_mode
    if not stat.S_ISREG(kind):
        raise ImageError("a folder, not a file" if stat.S_ISDIR(kind) else "not a regular file")
    return open(path, "rb")
