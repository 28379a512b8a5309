"""Image files as arrays: every flavour becomes uint8 RGB, upright, or an ImageError that says why not."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from PIL import Image

from finessl.data.paths import PathTable
from finessl.errors import FinesslError

Source = str | os.PathLike[str] | bytes | BinaryIO

# What Pillow reads without outside programs (EPS and PDF need Ghostscript; video containers are not images).
# fmt: off
EXTENSIONS = frozenset({
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".bmp", ".dib", ".gif", ".tif", ".tiff", ".ppm", ".pgm",
    ".pbm", ".pnm", ".pfm", ".jp2", ".j2k", ".jpx", ".avif", ".tga", ".ico", ".pcx", ".qoi", ".sgi", ".dds", ".xbm",
})
# fmt: on
PIECE = 1 << 14  # bytes of each of the three pieces that identify a large file
ORIENTATION = 0x0112  # the EXIF tag, and what undoes each of its values
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
    """This image cannot be used; the message is the reason."""


def decode(source: Source, *, shorter: int | None = None, square: int | None = None) -> np.ndarray:
    """uint8 [h, w, 3] of an image file, its bytes or an open file, made smaller as `fitted` says."""
    return np.asarray(load(source, shorter=shorter, square=square))


def load(source: Source, *, shorter: int | None = None, square: int | None = None) -> Image.Image:
    """The same as an RGB Pillow image.

    A JPEG at least four times larger than asked is first shrunk by its decoder, to no less than twice the size asked:
    several times faster, and after the bilinear step the mean difference is below one grey level.
    """
    try:
        with _open(source) as image:
            height, width = fitted(image.height, image.width, shorter=shorter, square=square)
            stored = image.size
            draft = image.draft(None, (2 * width, 2 * height)) if shorter or square else None
            image.load()
            if draft and image.size != stored:  # the decoder rounds the size up; the box is what it really covers
                image = image.resize((width, height), Image.Resampling.BILINEAR, draft[1])
            image = to_rgb(image)
            if (image.height < image.width) != (height < width):  # it was turned
                height, width = width, height
            return resize(image, height, width)
    except Exception as error:  # Pillow's plugins raise anything on bytes they did not expect
        raise _reason(error, source) from error


def probe(source: Source) -> tuple[int, int]:
    """(height, width) from the header alone, before any EXIF rotation."""
    try:
        with _open(source) as image:
            return image.height, image.width
    except Exception as error:
        raise _reason(error, source) from error


def fitted(height: int, width: int, *, shorter: int | None = None, square: int | None = None) -> tuple[int, int]:
    """The size to keep of an image: shorter side down to `shorter` (as torchvision's Resize), or squashed to a square.

    Nothing is made larger here: small images are cheaper to store as they are and are enlarged on the device.
    """
    if square:
        return (square, square) if max(height, width) > square else (height, width)
    short, long = sorted((height, width))
    if not shorter or short <= shorter:
        return height, width
    long = int(shorter * long / short)
    return (shorter, long) if height <= width else (long, shorter)


def resize(image: Image.Image, height: int, width: int) -> Image.Image:
    if (width, height) == image.size:
        return image
    return image.resize((width, height), Image.Resampling.BILINEAR)


def _open(source: Source) -> Image.Image:
    """Reads the header. Pillow only warns above its limit for decompression bombs; here that is an error."""
    image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    limit = Image.MAX_IMAGE_PIXELS
    if limit and image.width * image.height > limit:
        image.close()
        raise ImageError(
            f"{image.width}×{image.height} pixels, over the limit of {limit:,} (a decompression bomb?); "
            "shrink the file, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
        )
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow image as 8-bit RGB, upright, transparent parts white."""
    try:
        turn = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # unreadable metadata does not spoil the pixels
        turn = None
    if turn is not None:
        image = image.transpose(turn)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = Image.fromarray(_eight_bits(np.asarray(image)))
    elif "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _eight_bits(values: np.ndarray) -> np.ndarray:
    """Grey values of more than 8 bits: 16-bit files by their high byte, others by the range they use."""
    if values.dtype.itemsize == 2:
        return (values >> 8).astype(np.uint8)
    values = np.nan_to_num(values.astype(np.float64))
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 65535:
        values = (values - low) / max(high - low, 1e-9) * 255
    elif high > 255:
        values = values // 256
    elif high <= 1 and not (values == np.floor(values)).all():  # floats in [0, 1]
        values = values * 255
    return values.round().astype(np.uint8)


def to_bytes(values: np.ndarray, what: str) -> np.ndarray:
    """uint8 of floats in 0…1 or of integers in 0…255; the error calls the array `what`."""
    if values.dtype == np.uint8:
        return values
    floats = np.issubdtype(values.dtype, np.floating)
    if values.size and not (values.min() >= 0 and values.max() <= (1 if floats else 255)):  # NaN is neither
        wrong = "floats outside 0…1" if floats else f"{values.dtype} values outside 0…255"
        raise FinesslError(f"{what} holds {wrong}; pass uint8, or floats between 0 and 1.")
    return (values * 255).round().astype(np.uint8) if floats else values.astype(np.uint8)


def _reason(error: Exception, source: Source) -> ImageError:
    if isinstance(error, ImageError):
        return error
    if isinstance(error, Image.DecompressionBombError):
        return ImageError(f"refused as a decompression bomb: {error}")
    if isinstance(error, FileNotFoundError):
        return ImageError("there is no such file (a broken link?)")
    if isinstance(error, Image.UnidentifiedImageError):
        on_disk = isinstance(source, (str, os.PathLike))
        empty = not (Path(source).stat().st_size if on_disk else source)  # type: ignore[arg-type]
        return ImageError("empty file (0 bytes)" if empty else "not an image that Pillow can read")
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ImageError(f"broken: {text or type(error).__name__}")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading; ImageError for a pipe, a socket or a device, whose reading may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ImageError("not a regular file")
    return open(path, "rb")


def excerpt_of(file: BinaryIO, size: int, start: int = 0) -> bytes:
    """Of the `size` bytes from `start` on: all where they are few, else pieces from the beginning, middle and end."""
    if size <= 3 * PIECE:
        file.seek(start)
        return file.read(size)
    pieces = []
    for place in (0, (size - PIECE) // 2, size - PIECE):
        file.seek(start + place)
        pieces.append(file.read(PIECE))
    return b"".join(pieces)


class Images(Protocol):
    """A sequence of images that may lie anywhere."""

    def __len__(self) -> int: ...

    def key(self, i: int) -> str:
        """A stable name: the path relative to the data, or "train/123"."""
        ...

    def read(self, i: int, *, shorter: int | None = None, square: int | None = None) -> np.ndarray:
        """uint8 [h, w, 3], made smaller as `fitted` says; ImageError when it cannot be."""
        ...

    def size(self, i: int) -> tuple[int, int]:
        """(height, width) before any rotation, without decoding where that is possible; ImageError as `read`."""
        ...

    def content(self, i: int) -> bytes:
        """What identifies the image: its file, or its pixels where it has none."""
        ...

    def excerpt(self, i: int) -> bytes:
        """`content` where it is short, else its beginning, middle and end (`excerpt_of`); ImageError as `read`."""
        ...

    def take(self, indices: np.ndarray) -> Images: ...

    def fingerprint(self) -> str:
        """The same for the same images in the same order, in another run too."""
        ...


class ArrayImages:
    """Images of one size in one array, never copied: uint8 [N, h, w, 3]."""

    def __init__(self, array: np.ndarray, prefix: str = "image", numbers: np.ndarray | None = None) -> None:
        if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3:
            raise FinesslError(f"images should be a uint8 array [N, h, w, 3], not {array.dtype} {list(array.shape)}.")
        self.array, self.prefix = array, prefix
        self.numbers = np.arange(len(array)) if numbers is None else numbers  # in the names, kept by `take`

    def __len__(self) -> int:
        return len(self.array)

    def key(self, i: int) -> str:
        return f"{self.prefix}/{self.numbers[i]}"

    def read(self, i: int, *, shorter: int | None = None, square: int | None = None) -> np.ndarray:
        size = fitted(*self.size(i), shorter=shorter, square=square)
        return self.array[i] if size == self.size(i) else np.asarray(resize(Image.fromarray(self.array[i]), *size))

    def size(self, i: int) -> tuple[int, int]:
        return self.array.shape[1], self.array.shape[2]

    def content(self, i: int) -> bytes:
        return self.array[i].tobytes()

    def excerpt(self, i: int) -> bytes:
        return excerpt_of(io.BytesIO(self.content(i)), self.array[i].nbytes)

    def take(self, indices: np.ndarray) -> ArrayImages:
        return ArrayImages(self.array[indices], self.prefix, self.numbers[indices])

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(repr(self.array.shape).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.array).data)
        return digest.hexdigest()


class FileImages:
    """Image files under one folder."""

    def __init__(self, root: Path, paths: PathTable) -> None:
        self.root, self.paths = Path(root), paths

    def __len__(self) -> int:
        return len(self.paths)

    def key(self, i: int) -> str:
        return self.paths[i]

    def path(self, i: int) -> Path:
        return self.root / self.paths[i]

    def read(self, i: int, *, shorter: int | None = None, square: int | None = None) -> np.ndarray:
        return decode(self.path(i), shorter=shorter, square=square)

    def size(self, i: int) -> tuple[int, int]:
        return probe(self.path(i))

    def content(self, i: int) -> bytes:
        try:
            with open_regular(self.path(i)) as file:
                return file.read()
        except OSError as error:
            raise _reason(error, b"") from error

    def excerpt(self, i: int) -> bytes:
        try:
            with open_regular(self.path(i)) as file:
                return excerpt_of(file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise _reason(error, b"") from error

    def take(self, indices: np.ndarray) -> FileImages:
        return FileImages(self.root, self.paths.take(indices))

    def fingerprint(self) -> str:
        return self.paths.fingerprint()
