"""Archives: WebDataset shards, CIFAR's pickles and binaries, and tar files that would write elsewhere."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.base import picture
from fuzz.damage import DEEP, VALUES, spoil
from fuzz.harness import Box, kind
from fuzz.weights import Code


def png(label: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture(np.random.default_rng(label), label)).save(buffer, "PNG")
    return buffer.getvalue()


def add(tar: tarfile.TarFile, name: str, data: bytes, **more: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in more.items():
        setattr(member, key, value)
    tar.addfile(member, io.BytesIO(data))


def odd_member(box: Box, tar: tarfile.TarFile) -> None:
    """A link, a device, a path that leads outside, or a name that is none."""
    rng = box.rng
    name = rng.choice(
        (
            "../canary",
            "/tmp/x/../../canary",
            str(box.canary),
            "a/../../canary",
            "x\n.png",
            "x" * 300 + ".png",
            "é\udcff.png",
            "",
            ".",
        )
    )
    kind_ = rng.choice(
        (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE)
    )
    add(
        tar,
        name,
        png(0) if kind_ == tarfile.REGTYPE else b"",
        type=kind_,
        linkname=rng.choice(("/etc/passwd", "../canary", "gone")),
    )


@kind("shards", 4)
def shards(box: Box) -> None:
    rng = box.rng
    folder = box.folder / "shards"
    folder.mkdir()
    for name in ("train-0.tar", "test-0.tar"):
        buffer = io.BytesIO()
        with tarfile.open(
            fileobj=buffer,
            mode=rng.choice(("w", "w", "w", "w:gz")),
            format=rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)),
        ) as tar:
            for i in range(6):
                add(tar, f"{i}.png", png(i % 2) if rng.random() < 0.9 else spoil(rng, png(i % 2)))
                if rng.random() < 0.8:
                    odd = rng.choice((b"", b"\xff", b"-1", b"99999999999999999999", b"\n", b"[/bold]", DEEP.encode()))
                    add(tar, f"{i}.cls", str(i % 2).encode() if rng.random() < 0.9 else odd)
                else:
                    value = rng.choice((i % 2, *VALUES))
                    add(
                        tar,
                        f"{i}.json",
                        json.dumps(rng.choice(({"label": value}, value))).encode("utf-8", "surrogatepass"),
                    )
            if rng.random() < 0.4:
                odd_member(box, tar)
        data = buffer.getvalue()
        (folder / name).write_bytes(spoil(rng, data) if rng.random() < 0.4 else data)
    if rng.random() < 0.2:
        (folder / "classes.txt").write_bytes(rng.choice((b"", b"ant\nbee\n", b"\xff\n", b"ant\n", b"ant\nant\n")))
    box.run(rng.choice(("inspect", "split")), folder)


@kind("cifar", 3)
def cifar(box: Box) -> None:
    """CIFAR's own files, with code, forged types, or spoilt bytes in them."""
    rng, folder = box.rng, box.folder / "cifar-10-batches-py"
    folder.mkdir()
    data = np.zeros((4, 3072), np.uint8)
    batch: dict[Any, Any] = {b"data": data, b"labels": [0, 1, 0, 1]}
    contents: dict[str, Any] = {name: dict(batch) for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")}
    contents["batches.meta"] = {b"label_names": [b"ant", b"bee"]}
    victim = rng.choice(sorted(contents))
    key = next(iter(contents[victim]))
    how = rng.choice(("code", "dtype", "value", "value", "spoil", "spoil", "object"))
    if how == "code":
        contents[victim][key] = Code(box.canary)
    elif how == "object":
        contents[victim][key] = np.array([Code(box.canary), 1], object)
    elif how == "value":
        odd = (
            np.zeros((4, 10)),
            np.zeros(3),
            np.zeros((4, 3072), np.float64) * np.nan,
            np.array(["a"] * 4),
            data[:2],
            [[1]],
            [1, "a"],
            *VALUES,
        )
        contents[victim][key] = rng.choice(odd)
    for name, content in contents.items():
        written = pickle.dumps(content, rng.choice((2, 4)))
        if name == victim and how == "dtype":
            written = FORGED
        if name == victim and how == "spoil":
            written = spoil(rng, written)
        (folder / name).write_bytes(written)
    box.run(rng.choice(("inspect", "split")), "cifar10", "--root", box.folder)


# A dtype whose state says that plain bytes are pointers to objects: unpickled by NumPy, it ends in a crash.
FORGED = (
    b"\x80\x02}(U\x0blabel_namesU\x04dataU\x06labelscnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    b"(K\x01K\x01\x85cnumpy\ndtype\nU\x02V8K\x00K\x01\x87R(K\x03U\x01|NU\x01f\x85}U\x01fcnumpy\ndtype\nU\x02O8K\x00K\x01\x87RK\x00\x86sK\x08K\x01K\x00tb"
    b"\x89U\x08AAAAAAAAtbu."
)


@kind("tar-files", 2)
def tar_files(box: Box) -> None:
    """The archives of --download: nothing may be written outside of their folder."""
    from finessl.data.download import unpack
    from finessl.errors import FinesslError

    path, root = box.folder / "a.tar", box.folder / "inside"
    root.mkdir()
    with tarfile.open(path, box.rng.choice(("w", "w:gz", "w:bz2"))) as tar:
        add(tar, "cifar-10-batches-py/x", b"x")
        for _ in range(box.rng.randint(0, 2)):
            odd_member(box, tar)
    if box.rng.random() < 0.4:
        path.write_bytes(spoil(box.rng, path.read_bytes()))
    before = outside(box.folder, root)
    try:
        unpack(path, root, "cifar-10-batches-py")
    except FinesslError:
        box.refused = True
    after = outside(box.folder, root)
    box.expect(after == before, f"files outside of the folder: {sorted(after - before)}")


def outside(folder: Path, root: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.is_relative_to(root)}
