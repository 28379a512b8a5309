"""Files that are whole or absent, and sentences for those that are damaged."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import TypedDict

from finessl.errors import FinesslError
from finessl.runtime.files import (
    DamagedFile,
    read_arrays,
    read_json,
    replacing,
    sha256,
    write_arrays,
    write_atomically,
    writing,
)


class Thing(TypedDict):
    name: str
    sizes: list[int]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"name": "a", "sizes": [1',
        b"[1, 2]",
        b"null",
        b'{"name": "a"}',
        b'{"name": 3, "sizes": []}',
        b'{"name": "a", "sizes": ["1"]}',
        b'{"name": "a", "sizes": [true]}',
        b"\xff\xfe\x00garbage",
        b"[" * 100_000,
        b'{"name": "a", "sizes": [' + b"9" * 5_000 + b"]}",
    ],
)
def test_damaged_json_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "thing.json"
    file.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"thing\.json is damaged: "):
        read_json(file, Thing)


def test_json_that_is_no_file_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FinesslError, match="cannot read"):
        read_json(tmp_path / "gone.json", Thing)
    with pytest.raises(FinesslError, match="not a regular file"):
        read_json(tmp_path, Thing)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(FinesslError, match="not a regular file"):
        read_json(tmp_path / "pipe.json", Thing)
    monkeypatch.setattr("finessl.runtime.files.MAX_JSON_BYTES", 10)
    write_atomically(tmp_path / "long.json", '{"name": "a", "sizes": []}')
    with pytest.raises(FinesslError, match="more than such a file can have"):
        read_json(tmp_path / "long.json", Thing)


def test_names_that_are_not_utf8_keep_their_bytes(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    write_atomically(tmp_path / "thing.json", f'{{"name": "{name}", "sizes": []}}')
    assert b"caf\xe9" in (tmp_path / "thing.json").read_bytes()
    assert read_json(tmp_path / "thing.json", Thing)["name"] == name


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.txt", "old")
    with pytest.raises(KeyError), replacing(tmp_path / "a.txt") as partial:
        partial.write_text("half")
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for path, message in (
        (tmp_path / "folder", "It is a folder; name a file"),
        (tmp_path / "file" / "below", "A file is in its place"),
        (tmp_path / "nowhere" / "file", "No such file or directory"),
        (tmp_path / ("n" * 300), "File name too long"),
    ):
        with pytest.raises(FinesslError, match=message), writing(path):
            write_atomically(path, "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_damaged_arrays_are_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    write_arrays(file, {"x": np.arange(1000), "y": np.ones((3, 2), np.float16)})
    arrays = read_arrays(file, "x", "y")
    assert (arrays["x"] == np.arange(1000)).all() and arrays["y"].shape == (3, 2)
    whole = file.read_bytes()
    with pytest.raises(DamagedFile, match="holds no z"):
        read_arrays(file, "z")
    for place in (5, 40, 80, 200, len(whole) - 30):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            assert (read_arrays(file)["x"] == np.arange(1000)).all()  # a byte that nothing depends on
        except (FinesslError, KeyError):
            continue
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(DamagedFile, match=r"a\.npz is damaged"):
            read_arrays(file)
    with pytest.raises(FinesslError, match="there is no file"):
        read_arrays(tmp_path / "gone.npz")


def test_arrays_take_no_more_memory_than_they_have_bytes(tmp_path: Path) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,), }"
    header += b" " * (63 - (len(header) + 10) % 64) + b"\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 80)
    with pytest.raises(DamagedFile, match="another size than its header says"):
        read_arrays(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.array([print], object))
    with pytest.raises(DamagedFile, match="holds Python objects"):
        read_arrays(tmp_path / "b.npz")


def test_devices_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FinesslError, match="a device or a pipe"):
        write_atomically(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 1


def test_a_folder_is_no_file_to_write() -> None:
    with pytest.raises(FinesslError, match="It is a folder; name a file"), writing(Path()):
        write_atomically(Path(), "x")


def test_a_pipe_has_no_checksum(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FinesslError, match="not a regular file"):
        sha256(tmp_path / "pipe")
