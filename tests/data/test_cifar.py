"""CIFAR in its published forms, on a few images in the same layout; and what a pickle may not do."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from finessl.data.sources import open_dataset
from finessl.errors import FinesslError

COUNT = 12  # images a file


def planes(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (COUNT, 3072), dtype=np.uint8)


def upright(rows: np.ndarray) -> np.ndarray:
    """Each row is a red, a green and a blue plane of 32×32; by hand, pixel by pixel for a few."""
    images = np.empty((len(rows), 32, 32, 3), np.uint8)
    for channel in range(3):
        images[..., channel] = rows[:, channel * 1024 : (channel + 1) * 1024].reshape(-1, 32, 32)
    return images


def cifar100(root: Path, protocol: int, keys=str, **changes) -> Path:
    """keys=str.encode writes names as Python 2 did."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    labels = [i % 3 for i in range(COUNT)]
    for seed, part in enumerate(("train", "test")):
        content = {keys("data"): planes(seed), keys("fine_labels"): labels, keys("coarse_labels"): [0] * COUNT}
        content |= changes.get(part, {})
        (folder / part).write_bytes(pickle.dumps(content, protocol))
    names = {keys("fine_label_names"): [keys(name) for name in ("apple", "bear", "cup")]}
    (folder / "meta").write_bytes(pickle.dumps(names, protocol))
    return root


@pytest.mark.parametrize("protocol, keys", [(2, str.encode), (2, str), (4, str), (5, str)])
def test_python_files(tmp_path: Path, protocol: int, keys) -> None:
    root = cifar100(tmp_path, protocol, keys)
    for where in (root, root / "cifar-100-python"):
        data = open_dataset("cifar100", root=where)
        assert data.name == "cifar100" and data.classes == ["apple", "bear", "cup"] and data.given is None
        assert (data.train.array == upright(planes(0))).all() and (data.test.array == upright(planes(1))).all()
        assert data.train_labels.tolist() == [i % 3 for i in range(COUNT)]
        assert data.train.key(5) == "train/5" and data.test.key(0) == "test/0"
        assert data.statistics == ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))


def test_cifar10_python_files_are_five(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for seed in range(6):
        name = f"data_batch_{seed + 1}" if seed < 5 else "test_batch"
        content = {b"data": planes(seed), b"labels": [seed % 2] * COUNT}
        (folder / name).write_bytes(pickle.dumps(content, 2))
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"airplane", b"automobile"]}, 2))
    data = open_dataset("cifar10", root=tmp_path)
    assert (data.train.array == upright(np.concatenate([planes(i) for i in range(5)]))).all()
    assert data.train_labels.tolist() == sum(([i % 2] * COUNT for i in range(5)), [])
    (folder / "data_batch_3").unlink()
    with pytest.raises(FinesslError, match="data_batch_3 is missing"):
        open_dataset("cifar10", root=tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_binary_files(tmp_path: Path, name: str) -> None:
    ten = name == "cifar10"
    folder = tmp_path / ("cifar-10-batches-bin" if ten else "cifar-100-binary")
    folder.mkdir()
    labels = np.arange(COUNT, dtype=np.uint8)[:, None] % 2
    before = labels if ten else np.concatenate([labels + 7, labels], 1)  # CIFAR-100: coarse, then fine
    files = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"] if ten else ["train", "test"]
    for seed, file in enumerate(files):
        np.concatenate([before, planes(seed)], 1).tofile(folder / f"{file}.bin")
    (folder / ("batches.meta.txt" if ten else "fine_label_names.txt")).write_text("first\nsecond\n\n")
    data = open_dataset(name, root=tmp_path)
    assert data.classes == ["first", "second"] and (data.train.array[:COUNT] == upright(planes(0))).all()
    assert (data.test_labels == labels[:, 0]).all() and (data.test.array == upright(planes(len(files) - 1))).all()
    with open(folder / f"{files[0]}.bin", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(FinesslError, match="cut short: 5,000 bytes"):
        open_dataset(name, root=tmp_path)


def test_class_folders(tmp_path: Path, make) -> None:
    make.class_folder(tmp_path / "train", {"apple": 2, "bear": 3})
    make.class_folder(tmp_path / "test", {"bear": 1})
    data = open_dataset("cifar100", root=tmp_path)
    assert data.name == "cifar100" and data.statistics is not None and data.classes == ["apple", "bear"]
    assert data.train_labels.tolist() == [0, 0, 1, 1, 1]


class Harmful:
    def __reduce__(self):
        return (eval, ("__import__('pathlib').Path('harm').touch()",))


def test_a_pickle_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = cifar100(tmp_path / "x", 4, train={"extra": Harmful()})
    with pytest.raises(FinesslError, match="train: asks for builtins.eval"):
        open_dataset("cifar100", root=root)
    assert not Path("harm").exists()
    sneaky = b"cos\nsystem\n(S'touch harm'\ntR."
    (root / "cifar-100-python" / "train").write_bytes(sneaky)
    with pytest.raises(FinesslError, match=r"asks for (os|posix)\.system"):
        open_dataset("cifar100", root=root)
    assert not Path("harm").exists()


FORGED = (3, "|", None, ("f",), {"f": (np.dtype("O"), 0)}, 8, 1, 0)  # bytes that NumPy would take for pointers


class Forged:
    """A dtype with a chosen state, as no array writes it."""

    def __reduce__(self):
        return np.dtype, ("V8", False, True), FORGED


@pytest.mark.parametrize("value", [Forged(), np.array([None]), np.arange(3.0), np.dtype("i8")])
def test_no_dtype_but_bytes_is_built(tmp_path: Path, value: object) -> None:
    root = cifar100(tmp_path / "x", 4, train={"extra": value})
    with pytest.raises(FinesslError, match="holds an array of .*, not of bytes: refused"):
        open_dataset("cifar100", root=root)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_every_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    root = cifar100(tmp_path / "x", protocol)
    assert (open_dataset("cifar100", root=root).train.array == upright(planes(0))).all()


def test_a_pickle_cannot_ask_for_much_memory(tmp_path: Path) -> None:
    root = cifar100(tmp_path / "x", 4)
    (root / "cifar-100-python" / "train").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")
    with pytest.raises(FinesslError, match="more memory than it can need"):
        open_dataset("cifar100", root=root)


@pytest.mark.parametrize("labels", ["0123", [0, "1", 2], [0, 1.5], [10**40], None, [[0]]])
def test_labels_of_another_kind(tmp_path: Path, labels: object) -> None:
    root = cifar100(tmp_path / "x", 4, train={"fine_labels": labels})
    with pytest.raises(FinesslError, match="fine_labels should be a list of integers"):
        open_dataset("cifar100", root=root)


def test_damaged_files(tmp_path: Path) -> None:
    whole = cifar100(tmp_path / "whole", 4) / "cifar-100-python" / "train"
    data = whole.read_bytes()
    for content in (data[: len(data) // 2], b"", b"not a pickle"):
        whole.write_bytes(content)
        with pytest.raises(FinesslError, match="damaged"):
            open_dataset("cifar100", root=tmp_path / "whole")
    whole.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(FinesslError, match="no entry 'data'"):
        open_dataset("cifar100", root=tmp_path / "whole")
    cifar100(tmp_path / "labels", 4, train={"fine_labels": [0, 1, 3] * 4})
    with pytest.raises(FinesslError, match="labels outside 0 … 2"):
        open_dataset("cifar100", root=tmp_path / "labels")
    cifar100(tmp_path / "few", 4, test={"fine_labels": [0]})
    with pytest.raises(FinesslError, match="test should be images of 3,072 bytes"):
        open_dataset("cifar100", root=tmp_path / "few")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FinesslError, match="holds no cifar10: put cifar-10-batches-py/"):
        open_dataset("cifar10", root=tmp_path)
    with pytest.raises(FinesslError, match="needs root"):
        open_dataset("cifar10")


def test_sample_stacks(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 2)):
        (tmp_path / part).mkdir()
        for seed, name in enumerate(("cat", "dog")):
            stack = Image.fromarray(upright(planes(seed))[:count].reshape(-1, 32, 3))
            stack.save(tmp_path / part / f"{name}.webp", lossless=True)
    data = open_dataset("sample", root=tmp_path)
    assert data.classes == ["cat", "dog"] and data.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert (data.train.array[3:] == upright(planes(1))[:3]).all() and len(data.test) == 4
    (tmp_path / "test" / "dog.webp").unlink()
    with pytest.raises(FinesslError, match="sample"):
        open_dataset("sample", root=tmp_path)


def test_the_sample_of_the_package_opens() -> None:
    data = open_dataset("sample")
    assert len(data.classes) >= 2 and data.train.array.shape[1:] == (32, 32, 3) and len(data.test or []) > 0
    assert np.bincount(data.train_labels).min() >= 20
