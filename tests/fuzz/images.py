"""Image files of every format and mode, spoilt in every way, among good ones."""

from __future__ import annotations

import csv
import io
import os
import random
import socket
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

from fuzz.base import CLASSES, FAST, make_photos
from fuzz.damage import spoil
from fuzz.harness import Box, Result, kind

MODES = {
    "png": ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16"), "jpg": ("L", "RGB", "CMYK"), "webp": ("RGB", "RGBA"),
    "gif": ("P", "L", "RGB"), "tif": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I", "I;16", "F"),
    "bmp": ("1", "L", "P", "RGB"), "ppm": ("1", "L", "RGB", "I"), "ico": ("RGBA",), "pcx": ("1", "L", "P", "RGB"),
    "tga": ("1", "L", "LA", "P", "RGB", "RGBA"), "sgi": ("L", "RGB", "RGBA"), "dds": ("RGB", "RGBA"),
    "jp2": ("L", "RGB", "RGBA"), "pfm": ("F",), "xbm": ("1",),
}  # fmt: skip
SIZES = ((1, 1), (1, 300), (300, 1), (7, 5), (40, 30), (64, 64), (20_000, 3), (3, 20_000))


def encoded(rng: random.Random, suffix: str) -> bytes:
    """A whole image file."""
    mode, size = rng.choice(MODES[suffix]), rng.choice(SIZES[:6] if suffix in ("ico", "gif", "jp2") else SIZES)
    noise = np.frombuffer(rng.randbytes(size[0] * size[1] * 3), np.uint8).reshape(size[1], size[0], 3)
    image = Image.fromarray(noise)
    if mode in ("F", "I", "I;16"):
        grey = noise[..., 0].astype({"F": np.float32, "I": np.int32, "I;16": np.uint16}[mode])
        image = Image.fromarray(grey * (rng.choice((1, 16, 256)) if mode != "F" else 1))
    elif mode == "LAB":
        image = Image.frombytes("LAB", size, noise.tobytes())
    else:
        image = image.convert("L").convert(mode) if mode in ("LA", "1") else image.convert(mode)
    buffer = io.BytesIO()
    options: dict[str, object] = {}
    if suffix in ("jpg", "webp", "png", "tif") and rng.random() < 0.3:
        exif = Image.Exif()
        exif[0x0112] = rng.choice((1, 3, 6, 8, 0, 9, 65535))
        options["exif"] = exif.tobytes()
    if suffix in ("gif", "webp", "png", "tif") and rng.random() < 0.2:
        options |= {"save_all": True, "append_images": [image, image]}
    Image.init()
    try:
        image.save(buffer, Image.EXTENSION[f".{suffix}"], **options)
    except (OSError, ValueError, KeyError, RuntimeError):  # what can be written depends on Pillow's version
        image.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def bomb(rng: random.Random) -> bytes:
    """A PNG whose header promises more pixels than any memory holds, or a text chunk that grows a thousandfold."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    width, height = rng.choice(((2**31 - 1, 2**31 - 1), (100_000, 100_000), (60_000, 60_000), (0, 10), (2**31 - 1, 1)))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = zlib.compress(bytes(10_000_000), 9)
    text = chunk(b"zTXt", b"a\0\0" + body) if rng.random() < 0.3 else b""
    return start + text + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def exif_of_garbage(rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (9, 9)).save(buffer, "JPEG", exif=b"Exif\0\0" + rng.randbytes(rng.randint(0, 60)))
    return buffer.getvalue()


def text_of_garbage(rng: random.Random) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", "<x:xmpmeta>" + "a" * rng.randint(0, 100_000), zip=True)
    buffer = io.BytesIO()
    Image.new("RGB", (9, 9)).save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n0 0 moveto 10 10 lineto stroke showpage\n%%EOF\n"
OTHERS = (
    EPS, b"%PDF-1.4\n1 0 obj<<>>endobj\ntrailer<<>>\n%%EOF", b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    b"PK\3\4" + bytes(60),
    b"\xff\xd8\xff\xe0", b"GIF89a" + b"\xff" * 20, b"RIFF\xff\xff\xff\xffWEBPVP8 ", b"\0\0\0\x1cftypavif" + bytes(80),
    b"\0\0\0\x18ftypheic" + bytes(80), b"II*\0\x08\0\0\0\xff\xff" + bytes(90), b"8BPS\0\1" + bytes(60),
    b"SIMPLE  =" + b" " * 200,
    b"\xd7\xcd\xc6\x9a" + bytes(80), b"qoif\xff\xff\xff\xff\xff\xff\xff\xff\3\0", b"P6 99999 99999 255\n",
    b"P5 -1 -1 255\n", b"P6\n# x",
)  # fmt: skip


def special_file(rng: random.Random, path: Path, box: Box) -> None:
    """Names that no regular file has."""
    how = rng.choice(("fifo", "socket", "loop", "nowhere", "folder", "zero", "full", "mode"))
    if how == "fifo":
        os.mkfifo(path)
    elif how == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket must be short
        socket.socket(socket.AF_UNIX).bind(path.name)
        os.chdir(here)
    elif how in ("loop", "nowhere", "zero", "full"):
        os.symlink({"loop": path.name, "nowhere": "gone.png", "zero": "/dev/zero", "full": "/dev/full"}[how], path)
    elif how == "folder":
        path.mkdir()
    else:
        path.write_bytes(encoded(rng, "png"))
        path.chmod(0)


def hostile(box: Box, folder: Path) -> Path:
    """Write one hostile image file."""
    rng = box.rng
    suffix = rng.choice([*MODES])
    roll = rng.random()
    name = f"x.{rng.choice([*MODES]) if roll > 0.9 else suffix}"
    if roll < 0.08:
        special_file(rng, folder / name, box)
        return folder / name
    if roll < 0.75:
        data = encoded(rng, suffix)
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            data = spoil(rng, data)
    else:
        made = rng.choice((bomb, exif_of_garbage, text_of_garbage, lambda rng: rng.choice(OTHERS)))
        data = made(rng)
    (folder / name).write_bytes(data)
    return folder / name


@kind("images", 10)
def images(box: Box) -> None:
    if box.rng.random() < 0.6:
        folder = box.folder / "new"
        folder.mkdir()
        names = [hostile(box, folder).name]
        if box.rng.random() < 0.5:
            Image.new("RGB", (20, 20), "red").save(folder / "good.png")
            names.append("good.png")
        result = box.run("predict", box.base / "done", folder, "--device", "cpu")
        check_predictions(box, result, names, "good.png" in names)
        return
    photos = make_photos(box.folder / "photos", CLASSES[:2], unlabeled=2, test=1)
    part = box.rng.choice(("labeled/ant", "unlabeled", "test/ant"))
    hostile(box, photos / part)
    verb = box.rng.choice(("inspect", "inspect", "split", "train", "evaluate"))
    if verb == "train":
        box.run("train", photos, "--out", box.folder / "run", *FAST, must="work")
    elif verb == "evaluate":
        result = box.run("evaluate", box.base / "done", photos, "--device", "cpu")
        box.expect("nan" not in result.out, f"evaluate printed nan: {result.out}")
    else:
        box.run(verb, photos, must="work")


def check_predictions(box: Box, result: Result, names: list[str], good: bool) -> None:
    """Each file has a line with a known class and a probability, or is named as skipped."""
    if not result.ok:
        box.expect(not good, f"a good image got no prediction: {result.err}")
        return
    rows = list(csv.DictReader(io.StringIO(result.out)))
    told = [os.path.basename(row["path"]) for row in rows]
    for row in rows:
        box.expect(row["label"] in CLASSES, f"predict printed the class {row['label']!r}")
        box.expect(0 < float(row["confidence"]) <= 1, f"predict printed the confidence {row['confidence']}")
    box.expect(bool(rows), "predict found nothing to predict and ended well")
    for name in names:
        if os.path.isdir(Path(result.argv[2]) / name):
            continue
        box.expect(name in told or name in result.err, f"{name} has neither a prediction nor a word")
