"""What is kept on disk: identified by content, checked, limited, shown and cleared."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from finessl.cli import app
from finessl.data import cache
from finessl.data.folder_index import FolderIndex
from finessl.data.pixel_store import PixelStore
from finessl.data.sources import open_dataset
from finessl.errors import FinesslError
from finessl.frozen.features import FeatureStore


@pytest.fixture
def photos(tmp_path: Path, make) -> Path:
    for i in range(6):
        make.write(tmp_path / "photos" / "ab"[i % 2] / f"{i}.bmp", i, 20, 24)
    return tmp_path / "photos"


def build(photos: Path, folder: Path | None, shorter: int = 16) -> PixelStore:
    return PixelStore.build(open_dataset(photos).train, shorter=shorter, cache_dir=folder, memory_limit_bytes=0)


def only(folder: Path) -> Path:
    (store,) = (path for path in folder.iterdir() if path.is_dir())
    return store


@pytest.mark.parametrize("keep_time", [False, True])
def test_replaced_image_of_the_same_size_is_decoded_again(photos: Path, tmp_path: Path, make, keep_time: bool) -> None:
    old = build(photos, tmp_path / "c").image(0).copy()
    before = (photos / "a" / "0.bmp").stat()
    make.write(photos / "a" / "0.bmp", 99, 20, 24)
    if keep_time:  # then the sampled content tells
        os.utime(photos / "a" / "0.bmp", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (photos / "a" / "0.bmp").stat().st_size == before.st_size
    assert not np.array_equal(build(photos, tmp_path / "c").image(0), old)


def test_image_outside_the_sample_is_told_by_its_time(photos: Path, tmp_path: Path, make, monkeypatch) -> None:
    monkeypatch.setattr("finessl.data.pixel_store.content_digest", lambda images: "")
    old = build(photos, tmp_path / "c").image(0).copy()
    make.write(photos / "a" / "0.bmp", 99, 20, 24)
    os.utime(photos / "a" / "0.bmp", (1, 1))
    assert not np.array_equal(build(photos, tmp_path / "c").image(0), old)


def test_overwritten_pixels_are_noticed_and_decoded_again(photos: Path, tmp_path: Path) -> None:
    first = build(photos, tmp_path / "c").fetch(np.arange(6))
    path = only(tmp_path / "c") / "pixels.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    damaged = build(photos, tmp_path / "c")
    with pytest.raises(FinesslError, match="are damaged and have been removed. Run the same command again"):
        damaged.fetch(np.arange(6))
    assert (build(photos, tmp_path / "c").fetch(np.arange(6)) == first).all()


@pytest.mark.parametrize("name", ["offsets", "sizes", "state", "sums"])
@pytest.mark.parametrize("place", [130, -3])
def test_flipped_bytes_of_the_tables_are_noticed(photos: Path, tmp_path: Path, name: str, place: int) -> None:
    first = build(photos, tmp_path / "c").fetch(np.arange(6))
    path = only(tmp_path / "c") / f"{name}.npy"
    data = bytearray(path.read_bytes())
    data[place] ^= 0x41
    path.write_bytes(data)
    assert (build(photos, tmp_path / "c").fetch(np.arange(6)) == first).all()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 2}', '"x"', "\xff"])
def test_damaged_manifest_is_built_again(photos: Path, tmp_path: Path, content: str) -> None:
    first = build(photos, tmp_path / "c").fetch(np.arange(6))
    (only(tmp_path / "c") / "store.json").write_text(content, encoding="latin-1")
    assert cache.entries(tmp_path / "c")
    assert (build(photos, tmp_path / "c").fetch(np.arange(6)) == first).all()


def test_least_recently_used_stores_give_way(photos: Path, tmp_path: Path, monkeypatch) -> None:
    sizes = {}
    for number, shorter in enumerate((10, 12, 14)):
        build(photos, tmp_path / "c", shorter)
        (new,) = {entry.path for entry in cache.entries(tmp_path / "c")} - set(sizes)
        sizes[new] = cache.size_of(new)
        os.utime(new / "store.json", (number, number))
    first, second, third = sizes
    build(photos, tmp_path / "c", 10)  # used again: now the second is the oldest
    monkeypatch.setenv("FINESSL_CACHE_GB", str((sum(sizes.values()) + 3000) / 1e9))
    build(photos, tmp_path / "c", 16)
    left = {entry.path for entry in cache.entries(tmp_path / "c")}
    assert first in left and third in left and second not in left and len(left) == 3
    assert not list((tmp_path / "c").glob("*.lock"))
    monkeypatch.setenv("FINESSL_CACHE_GB", "0")  # what is needed now is kept all the same
    build(photos, tmp_path / "c", 18)
    assert len(cache.entries(tmp_path / "c")) == 1


def test_what_another_process_builds_is_not_removed(photos: Path, tmp_path: Path, monkeypatch) -> None:
    build(photos, tmp_path / "c", 10)
    store = only(tmp_path / "c")
    part = store.rename(store.with_suffix(".part"))
    monkeypatch.setenv("FINESSL_CACHE_GB", "0")
    with FileLock((store).with_suffix(".lock")):
        build(photos, tmp_path / "c", 12)
        assert part.exists() and [entry.path for entry in cache.clear(tmp_path / "c")[1]] == [part]
    build(photos, tmp_path / "c", 14)
    assert not part.exists()


@pytest.mark.parametrize("text", ["many", "-1", "nan", "inf"])
def test_limit_that_is_no_number(monkeypatch, text: str) -> None:
    monkeypatch.setenv("FINESSL_CACHE_GB", text)
    with pytest.raises(FinesslError, match=f"FINESSL_CACHE_GB should be a number of gigabytes, not '{text}'"):
        cache.limit_bytes()


def test_show_and_clear(photos: Path, tmp_path: Path, capfd, monkeypatch, own_cache: Path) -> None:
    monkeypatch.setattr("finessl.data.folder_index.MIN_CACHED", 1)
    monkeypatch.setenv("COLUMNS", "200")
    app(["cache"], standalone_mode=False)
    assert "nothing is kept" in capfd.readouterr().out
    FolderIndex.open(photos)
    build(photos, None)
    build(photos, tmp_path / "own")
    (tmp_path / "own" / "notes.txt").write_text("mine")
    (own_cache / "pixels" / "thesis").mkdir()
    app(["cache"], standalone_mode=False)
    out = capfd.readouterr().out
    assert "decoded images: 6 images, shorter side 16, from a/0.bmp" in out and "list of the images in a folder" in out
    assert (
        str(own_cache) in out
        and "limit for decoded images: 100 GB" in out
        and re.search(r"less than a minute ago", out)
    )
    app(["cache", "clear"], standalone_mode=False)
    assert re.search(r"removed \d+\.\d kB", capfd.readouterr().out) and [
        p.name for p in (own_cache / "pixels").iterdir()
    ] == ["thesis"]
    assert not list((own_cache / "index").iterdir())
    assert len(cache.entries(tmp_path / "own")) == 1  # elsewhere
    app(["cache", "clear", "--cache-dir", str(tmp_path / "own")], standalone_mode=False)
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["notes.txt"]


def test_extreme_images_do_not_ask_for_much_memory(tmp_path: Path, make) -> None:
    """A batch takes the memory of its tallest times its widest image."""
    make.write(tmp_path / "a" / "tall.png", 1, 8000, 4)
    make.write(tmp_path / "b" / "wide.png", 2, 4, 8000)
    store = PixelStore.build(open_dataset(tmp_path).train, shorter=32)
    assert store.sizes.tolist() == [[128, 4], [4, 128]]
    assert store.fetch(np.array([0, 1])).shape == (2, 128, 128, 3)


def test_features_are_shown_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINESSL_CACHE", str(tmp_path / "cache"))
    store = FeatureStore(tmp_path / "cache" / "features" / ("0" * 24), 3, {"backbone": "embedded"})
    store.append(np.ones((2, 16), np.uint8), np.ones((2, 3), np.float16))
    (entry,) = cache.entries()
    assert entry.what == "features: embedded" and entry.size > 12
    cache.clear()
    assert cache.entries() == []


@pytest.mark.parametrize("content", ["[" * 5000, "null", None], ids=["deep", "null", "pipe"])
def test_an_entry_that_says_nothing_is_shown(own_cache: Path, content: str | None) -> None:
    entry = own_cache / "features" / ("0" * 24)
    entry.mkdir(parents=True)
    if content is None:
        os.mkfifo(entry / "encoder.json")
    else:
        (entry / "encoder.json").write_text(content)
    (found,) = cache.entries()
    assert found.what == "features: of an unknown backbone"
