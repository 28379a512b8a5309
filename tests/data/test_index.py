"""The index of a folder: cached for large sets, never stale, small and fast at 1.3 million images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from finessl.data import folder_index as index
from finessl.data.folder_index import FolderIndex, natural
from finessl.data.path_table import PathTable


def names(found: FolderIndex) -> list[str]:
    return [found.paths[i] for i in range(len(found.paths))]


def test_natural_order() -> None:
    assert sorted(["b", "a10", "a9b2", "a9", "10", "9", "", "a"], key=natural) == [
        "",
        "9",
        "10",
        "a",
        "a9",
        "a9b2",
        "a10",
        "b",
    ]
    assert sorted(["n2", "n02", "N1"], key=natural) == ["N1", "n02", "n2"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b/2.jpg", "b/10.jpg", "a/x/1.jpg", "a/0.jpg", "a/note.txt", "top.jpg", "empty/.keep"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_bytes(b"x" * len(name))
    return tmp_path / "d"


def test_one_pass(folder: Path) -> None:
    told: list[tuple[int, int | None]] = []
    found = FolderIndex.open(folder, progress=lambda *step: told.append(step))
    assert names(found) == ["top.jpg", "a/0.jpg", "a/x/1.jpg", "b/2.jpg", "b/10.jpg"]
    assert found.folders == ["", "a", "a/x", "b", "empty"] and found.counts().tolist() == [1, 1, 1, 2, 0]
    assert found.paths.sizes.tolist() == [7, 7, 9, 7, 8] and found.ignored == {".txt": 1}
    assert told[-1] == (5, 5)


def test_cached_and_never_stale(folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MIN_CACHED", 1)
    first = FolderIndex.open(folder)
    scan = FolderIndex.scan
    scans: list[Path] = []
    monkeypatch.setattr(FolderIndex, "scan", lambda root, progress=None: scans.append(root) or scan(root, progress))
    again = FolderIndex.open(folder)
    assert scans == [] and names(again) == names(first) and again.ignored == first.ignored
    assert again.paths.fingerprint() == first.paths.fingerprint() and isinstance(again.paths.names, np.memmap)
    (folder / "a" / "x" / "2.jpg").write_bytes(b"new")
    assert "a/x/2.jpg" in names(FolderIndex.open(folder)) and len(scans) == 1
    (folder / "b" / "2.jpg").unlink()
    assert "b/2.jpg" not in names(FolderIndex.open(folder)) and len(scans) == 2
    (folder / "empty").rename(folder / "renamed")
    assert "renamed" in FolderIndex.open(folder).folders and len(scans) == 3
    stored = next((own_cache / "index").iterdir())
    for file, content in (("offsets.npy", b""), ("index.json", b"{"), ("times.npy", b"junk")):
        (stored / file).write_bytes(content)  # damaged
        count = len(scans)
        assert len(FolderIndex.open(folder).paths) == 5 and len(scans) == count + 1


def test_small_folders_are_not_cached(folder: Path, own_cache: Path) -> None:
    FolderIndex.open(folder)
    assert not (own_cache / "index").exists()


def test_a_cache_that_cannot_be_written_does_no_harm(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(index, "MIN_CACHED", 1)
    (tmp_path / "file").touch()
    monkeypatch.setenv("FINESSL_CACHE", str(tmp_path / "file"))
    assert len(FolderIndex.open(folder).paths) == 5


def test_names_that_are_not_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File names are bytes on Linux; some are not UTF-8."""
    monkeypatch.setattr(index, "MIN_CACHED", 1)
    for name in (b"caf\xe9", "naïve".encode()):
        try:
            os.mkdir(os.fsencode(tmp_path) + b"/" + name)
            Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name + b"/\xff.jpg")).touch()
        except OSError:
            pytest.skip("this file system takes only UTF-8 names")
    for _ in range(2):
        found = FolderIndex.open(tmp_path)
        assert all((tmp_path / name).is_file() for name in names(found)) and len(found.paths) == 2


LARGE = """
import json, resource, sys
from pathlib import Path
import numpy as np
root = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
from finessl.data.folder_index import FolderIndex
found = FolderIndex.open(root)
labels = np.arange(1000)[found.paths.folder_of - 1]
name, fingerprint = found.paths[len(found.paths) - 1], found.paths.fingerprint()
memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(json.dumps([len(found.paths), name, fingerprint, int(labels.sum()), memory]))
"""


def test_1300000_images_reopen_in_little_memory(tmp_path: Path) -> None:
    """A cached index of ImageNet's size over real class folders (the files themselves are not needed to reopen it)."""
    count, classes = 1_300_000, 1000
    root = tmp_path / "images"
    folders = [""] + [f"n{i:08d}" for i in range(classes)]
    for folder in folders:
        (root / folder).mkdir(parents=True)
    width = len("n00000000_1234567.JPEG")
    numbers = np.arange(count)
    digits = (numbers[:, None] // 10 ** np.arange(6, -1, -1) % 10 + ord("0")).astype(np.uint8)
    blob = np.tile(np.frombuffer(b"n00000000_0000000.JPEG", np.uint8), (count, 1))
    blob[:, 10:17] = digits
    table = PathTable(
        folders,
        (1 + numbers * classes // count).astype(np.int32),
        blob.reshape(-1),
        np.arange(count + 1, dtype=np.int64) * width,
        np.full(count, 110_000, np.int64),
    )
    times = np.array([os.stat(root / folder).st_mtime_ns for folder in folders])
    stored = FolderIndex(root.resolve(), table, times)
    target = tmp_path / "cache" / "index" / index.name_of(root.resolve())
    stored.store(target)
    assert sum(file.stat().st_size for file in target.iterdir()) < 100 << 20
    command = [sys.executable, "-c", LARGE, str(root)]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "FINESSL_CACHE": str(tmp_path / "cache")}
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | paths).stdout
    length, name, fingerprint, total, memory = json.loads(output)
    assert (length, name) == (count, "n00000999/n00000000_1299999.JPEG")
    assert fingerprint == table.fingerprint() and total == 1300 * 999 * 1000 // 2
    assert memory < 400  # MB, NumPy and Pillow included
