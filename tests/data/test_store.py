"""Decoded pixels: in memory or in a file, whole or interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from finessl.data import pixel_file
from finessl.data import pixel_store as store
from finessl.data.decoding import decode
from finessl.data.images import ArrayImages
from finessl.data.pixel_file import PixelFile
from finessl.data.pixel_ops import Packed
from finessl.data.pixel_store import PixelStore
from finessl.data.sources import open_dataset
from finessl.errors import FinesslError


@pytest.fixture
def folder(tmp_path: Path, make) -> Path:
    """Six images of different sizes in two classes."""
    for number, (height, width) in enumerate([(40, 30), (20, 20), (64, 48), (10, 50), (48, 64), (33, 33)]):
        make.write(tmp_path / "data" / "ab"[number % 2] / f"{number}.png", number, height, width)
    return tmp_path / "data"


def contents(pixels: PixelStore) -> list[bytes]:
    return [pixels.image(i).tobytes() for i in range(len(pixels))]


@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize("options", [{"shorter": 32}, {"square": 24}, {}])
def test_every_image_as_decode_gives_it(folder: Path, tmp_path: Path, limit: int | None, options: dict) -> None:
    images = open_dataset(folder).train
    built = PixelStore.build(images, cache_dir=tmp_path / "c", memory_limit_bytes=limit, **options)
    assert isinstance(built.flat, np.memmap) == (limit == 0)
    assert len(built) == 6 and built.failures == [] and built.sizes.dtype == np.int32
    for i in range(6):
        expected = decode(folder / images.key(i), **options)
        assert built.sizes[i].tolist() == list(expected.shape[:2]) and (built.image(i) == expected).all()


@pytest.mark.parametrize("parallel", [0, 1 << 30])
def test_fetch_pads_to_the_largest_of_the_batch(folder: Path, monkeypatch, parallel: int) -> None:
    monkeypatch.setattr(store, "MIN_PARALLEL_BYTES", parallel)
    images = open_dataset(folder).train
    built = PixelStore.build(images, shorter=32)
    assert built.array is None
    order = np.array([4, 0, 4])
    pixels, sizes = built.fetch(order), built.sizes[order]
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, *built.sizes[order].max(0), 3)
    for row, i, (height, width) in zip(pixels.numpy(), order, sizes.tolist(), strict=True):
        assert (row[:height, :width] == built.image(i)).all()
        assert not row[height:].any() and not row[:, width:].any()


@pytest.mark.parametrize("limit", [None, 0])
def test_equal_sizes_make_one_array(tmp_path: Path, make, limit: int | None) -> None:
    make.class_folder(tmp_path / "d", {"a": 3, "b": 3})
    (tmp_path / "d" / "b" / "1.png").write_bytes(b"")  # a broken one does not spoil it
    built = PixelStore.build(open_dataset(tmp_path / "d").train, shorter=32, memory_limit_bytes=limit)
    assert built.array is not None and built.array.shape == (6, 8, 8, 3)
    pixels = built.fetch(np.array([5, 0]))
    assert (pixels.numpy() == built.array[[5, 0]]).all()
    assert (built.to_device("cpu").fetch(np.array([5, 0])) == pixels).all()


def test_arrays_are_neither_copied_nor_enlarged(make) -> None:
    array = np.stack([make.picture(i, 6, 6) for i in range(4)])
    built = PixelStore.build(ArrayImages(array), shorter=256)
    assert built.array is not None and np.shares_memory(built.array, array) and built.sizes.tolist() == [[6, 6]] * 4
    small = PixelStore.build(ArrayImages(array), square=3)
    assert small.array is not None and small.array.shape == (4, 3, 3, 3)
    expected = np.asarray(Image.fromarray(array[2]).resize((3, 3), Image.Resampling.BILINEAR))
    assert (small.array[2] == expected).all()


def test_statistics(make) -> None:
    array = np.stack([make.picture(i, 5, 5) for i in range(30)])
    mean, std = PixelStore.from_array(array).statistics()
    assert np.allclose(mean, (array / 255).mean((0, 1, 2))) and np.allclose(std, (array / 255).std((0, 1, 2)))
    few = array[[0, 14, 29]] / 255  # evenly spaced, both ends included
    assert np.allclose(PixelStore.from_array(array).statistics(sample=3)[0], few.mean((0, 1, 2)))


@pytest.mark.parametrize("limit", [None, 0])
def test_failures_are_listed_and_kept(folder: Path, tmp_path: Path, limit: int | None) -> None:
    (folder / "a" / "0.png").write_bytes(b"")
    whole = (folder / "b" / "3.png").read_bytes()
    (folder / "b" / "3.png").write_bytes(whole[: len(whole) // 2])  # its header is fine
    images = open_dataset(folder).train
    for _ in range(2):  # built, then reopened
        built = PixelStore.build(images, shorter=16, cache_dir=tmp_path / "c", memory_limit_bytes=limit)
        assert [(images.key(i), reason.split()[0]) for i, reason in built.failures] == [
            ("a/0.png", "empty"),
            ("b/3.png", "broken:"),
        ]
        bad = [i for i, _ in built.failures]
        assert built.sizes[bad].tolist() == [[0, 0], [0, 0]] and (np.delete(built.sizes, bad, 0) > 0).all()
        with pytest.raises(FinesslError, match=f"image {bad[1]} of the store could not be decoded"):
            built.fetch(np.array([1, bad[1]]))


def test_everything_broken(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(b"junk")
    built = PixelStore.build(open_dataset(tmp_path).train, shorter=16, memory_limit_bytes=-1)
    assert len(built.failures) == 2 and built.array is None


def test_rotated_images_take_their_turned_size(tmp_path: Path, make) -> None:
    for name in "ab":
        image = Image.fromarray(make.picture(0, 40, 60))
        exif = image.getexif()
        exif[0x0112] = 6
        (tmp_path / name).mkdir()
        image.save(tmp_path / name / "x.jpg", exif=exif)
    built = PixelStore.build(open_dataset(tmp_path).train, shorter=20)
    assert built.failures == [] and built.sizes.tolist() == [[30, 20]] * 2 and built.array is not None


def test_progress_reaches_the_end(folder: Path) -> None:
    told: list[tuple[int, int | None]] = []
    PixelStore.build(open_dataset(folder).train, shorter=16, progress=lambda *step: told.append(step), workers=1)
    assert told[-1] == (6, 6) and sorted(told) == told


def test_a_finished_file_is_reopened_without_decoding(folder: Path, tmp_path: Path, monkeypatch) -> None:
    images = open_dataset(folder).train
    first = contents(PixelStore.build(images, shorter=16, cache_dir=tmp_path / "c", memory_limit_bytes=0))
    monkeypatch.setattr(store.Fit, "decode", lambda *_: pytest.fail("decoded again"))
    again = PixelStore.build(images, shorter=16, cache_dir=tmp_path / "c", memory_limit_bytes=0)
    assert contents(again) == first
    with pytest.raises(ValueError, match="read-only"):
        again.flat[0] = 1
    monkeypatch.undo()
    other = PixelStore.build(
        images, shorter=17, cache_dir=tmp_path / "c", memory_limit_bytes=0
    )  # another size: decoded again
    assert other.sizes[0].tolist() == [22, 17] and again.sizes[0].tolist() == [21, 16]


def test_changed_images_are_decoded_again(folder: Path, tmp_path: Path, make) -> None:
    old = PixelStore.build(open_dataset(folder).train, cache_dir=tmp_path / "c", memory_limit_bytes=0)
    make.write(folder / "a" / "0.png", 77, 41, 31)
    new = PixelStore.build(open_dataset(folder).train, cache_dir=tmp_path / "c", memory_limit_bytes=0)
    assert old.sizes[0].tolist() == [40, 30] and new.sizes[0].tolist() == [41, 31]


class Stop(Exception):
    pass


@pytest.mark.parametrize("stop_at", [0, 1, 2, 5])
def test_an_interrupted_build_goes_on(folder: Path, tmp_path: Path, monkeypatch, stop_at: int) -> None:
    """Rounds of one image; the program dies after some of them; the next one decodes only the others."""
    monkeypatch.setattr(store, "ROUND", 1)
    (folder / "a" / "0.png").write_bytes(b"")
    images = open_dataset(folder).train
    options = {"shorter": 16, "cache_dir": tmp_path / "c", "memory_limit_bytes": 0}
    expected = PixelStore.build(images, shorter=16)
    noted = 0
    real = PixelFile.note

    def note(self, indices, failures) -> None:
        nonlocal noted
        if noted == stop_at:
            raise Stop
        real(self, indices, failures)
        noted += 1

    monkeypatch.setattr(PixelFile, "note", note)
    with pytest.raises(Stop):
        PixelStore.build(images, **options)
    assert sorted(path.suffix for path in (tmp_path / "c").iterdir()) == [".lock", ".part"]  # nothing looks finished
    monkeypatch.setattr(PixelFile, "note", real)
    decoded: list[int] = []
    read = type(images).read
    monkeypatch.setattr(type(images), "read", lambda self, i, **fit: decoded.append(i) or read(self, i, **fit))
    built = PixelStore.build(images, **options)
    assert sorted(decoded) == list(range(stop_at, 6))
    assert contents(built)[1:] == contents(expected)[1:] and built.failures == expected.failures
    assert sorted(path.suffix for path in (tmp_path / "c").iterdir()) == [""]


BUILD = """
import os, signal, sys
from pathlib import Path
from finessl.data import pixel_store as store
from finessl.data.sources import open_dataset
store.ROUND = 1
images = open_dataset(sys.argv[1]).train
def die_at_the_third(done, total):
    if done == 3:
        os.kill(os.getpid(), signal.SIGKILL)
options = {"cache_dir": Path(sys.argv[2]), "memory_limit_bytes": 0, "progress": die_at_the_third}
store.PixelStore.build(images, shorter=16, **options)
"""


def test_killed_while_building(folder: Path, tmp_path: Path) -> None:
    """SIGKILL, as the system does when memory runs out."""
    command = [sys.executable, "-c", BUILD, str(folder), str(tmp_path / "c")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    images = open_dataset(folder).train
    part = next((tmp_path / "c").glob("*.part"))
    done = int((np.load(part / "state.npy") == pixel_file.DONE).sum())
    assert done == 2  # the third was decoded, and not yet recorded
    told: list[int] = []
    built = PixelStore.build(
        images, shorter=16, cache_dir=tmp_path / "c", memory_limit_bytes=0, progress=lambda d, _: told.append(d)
    )
    assert told[-1] == 6 and contents(built) == contents(PixelStore.build(images, shorter=16))


def test_damaged_files_are_built_again(folder: Path, tmp_path: Path) -> None:
    images = open_dataset(folder).train
    options = {"shorter": 16, "cache_dir": tmp_path / "c", "memory_limit_bytes": 0}
    first = contents(PixelStore.build(images, **options))
    stored = next(path for path in (tmp_path / "c").iterdir() if path.is_dir())
    (stored / "sizes.npy").write_bytes(b"")
    assert contents(PixelStore.build(images, **options)) == first
    with open(stored / "pixels.bin", "r+b") as file:
        file.truncate(10)
    assert contents(PixelStore.build(images, **options)) == first


def test_no_room_and_no_permission(folder: Path, tmp_path: Path, monkeypatch) -> None:
    images = open_dataset(folder).train
    (tmp_path / "file").touch()
    with pytest.raises(FinesslError, match="cannot write decoded images to"):
        PixelStore.build(images, cache_dir=tmp_path / "file", memory_limit_bytes=0)
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(pixel_file.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(FinesslError, match="0.0 GB are needed and 0.0 GB are free. Free some space"):
        PixelStore.build(images, cache_dir=tmp_path / "c", memory_limit_bytes=0)
    assert not list((tmp_path / "c").glob("*/pixels.bin"))
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pixel_file.os, "posix_fallocate", full)
    with pytest.raises(FinesslError, match="No space left on device"):
        PixelStore.build(images, cache_dir=tmp_path / "c", memory_limit_bytes=0)
    assert [path.suffix for path in (tmp_path / "c").iterdir()] == [".lock"]


def test_a_second_builder_waits_for_the_first(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(store, "ROUND", 1)
    images = open_dataset(folder).train
    options = {"shorter": 16, "cache_dir": tmp_path / "c", "memory_limit_bytes": 0, "workers": 1}
    begun, decoded = threading.Event(), []

    def slowly(done: int, total: int | None) -> None:
        if done:
            decoded.append("first")
            begun.set()
            time.sleep(0.05)

    first = threading.Thread(target=PixelStore.build, args=(images,), kwargs={**options, "progress": slowly})
    first.start()
    begun.wait()
    built = PixelStore.build(images, **options, progress=lambda done, _: done and decoded.append("second"))
    first.join()
    assert decoded == ["first"] * 6 and contents(built) == contents(PixelStore.build(images, shorter=16))


def test_several_runs_share_files(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """As jobs of a grid, though the pixels would fit into memory."""
    monkeypatch.setenv("FINESSL_SHARED_PIXELS", "1")
    images, options = open_dataset(folder).train, {"shorter": 16, "cache_dir": tmp_path / "c"}
    counted: list[int] = []
    first, second = (
        PixelStore.build(images, **options, progress=lambda done, _: counted.append(done)) for _ in range(2)
    )
    assert isinstance(first.flat, np.memmap) and isinstance(second.flat, np.memmap) and counted == [0, 6]
    assert contents(first) == contents(second)


def test_a_disk_that_cannot_be_written_is_no_reason_to_fail(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FINESSL_SHARED_PIXELS", "1")
    (tmp_path / "c").write_text("a file where a folder should be")
    images = open_dataset(folder).train
    built = PixelStore.build(images, shorter=16, cache_dir=tmp_path / "c")
    assert not isinstance(built.flat, np.memmap) and len(contents(built)) == 6
    with pytest.raises(FinesslError, match="cannot write decoded images"):
        PixelStore.build(images, shorter=16, cache_dir=tmp_path / "c", memory_limit_bytes=0)


def unpacked(images: Packed) -> list[np.ndarray]:
    flat, sizes = images.flat.cpu().numpy(), images.sizes.tolist()
    return [flat[at : at + 3 * h * w].reshape(h, w, 3) for at, (h, w) in zip(images.start, sizes, strict=True)]


@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize("parallel", [0, 1 << 30])
def test_packed_images_are_copied_once(
    folder: Path, tmp_path: Path, monkeypatch, limit: int | None, parallel: int
) -> None:
    monkeypatch.setattr(store, "MIN_PARALLEL_BYTES", parallel)
    built = PixelStore.build(open_dataset(folder).train, shorter=32, cache_dir=tmp_path / "c", memory_limit_bytes=limit)
    order = np.array([4, 0, 4, 2])
    images = built.packed(order, torch.device("cpu"))
    assert all((image == built.image(i)).all() for image, i in zip(unpacked(images), order, strict=True))
    assert len(images) == 4 and len(images.flat) == sum(built.image(i).size for i in (0, 2, 4))


@pytest.mark.parametrize("limit", [None, 0])
def test_all_pixels_go_to_the_device(folder: Path, tmp_path: Path, monkeypatch, limit: int | None) -> None:
    monkeypatch.setattr(store, "PIECE", 1000)
    monkeypatch.setattr(store, "MIN_PARALLEL_BYTES", 500)
    built = PixelStore.build(open_dataset(folder).train, shorter=32, cache_dir=tmp_path / "c", memory_limit_bytes=limit)
    assert not built.resident and built.to_device("cpu").resident
    assert built._resident is not None and (built._resident.numpy() == built.flat).all()
    assert (built.fetch(np.array([1])).numpy()[0] == built.image(1)).all()


def test_an_unreadable_image_is_not_packed(folder: Path) -> None:
    (folder / "a" / "0.png").write_bytes(b"no image")
    built = PixelStore.build(open_dataset(folder).train, shorter=32)
    bad = built.failures[0][0]
    with pytest.raises(FinesslError, match=f"image {bad} of the store could not be decoded"):
        built.packed(np.array([1, bad]), torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("limit", [None, 0])
def test_images_of_many_sizes_on_a_gpu(folder: Path, tmp_path: Path, resident: bool, limit: int | None) -> None:
    """In its memory, or copied from pinned memory."""
    built = PixelStore.build(open_dataset(folder).train, shorter=32, cache_dir=tmp_path / "c", memory_limit_bytes=limit)
    device, order = torch.device("cuda", 0), np.array([4, 0, 4, 2])
    if resident:
        built.to_device(device)
    images = built.batch(order, device)
    assert isinstance(images, Packed) and images.device == device
    assert (images.flat is built._resident) == resident
    assert all((image == built.image(i)).all() for image, i in zip(unpacked(images), order, strict=True))


@pytest.mark.gpu
def test_on_a_gpu(make) -> None:
    array = np.stack([make.picture(i, 6, 6) for i in range(4)])
    plain = PixelStore.from_array(array)
    pixels = plain.fetch(np.array([2, 0]), "cuda")
    assert pixels.device.type == "cuda" and (pixels.cpu().numpy() == array[[2, 0]]).all()
    resident = PixelStore.from_array(array).to_device("cuda")
    pixels = resident.fetch(torch.tensor([2, 0], device="cuda"))
    assert (pixels.cpu().numpy() == array[[2, 0]]).all()
