"""Weights files are data: nothing in them is executed, and every content ends in tensors or in a FinesslError."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from finessl.errors import FinesslError
from finessl.models.weights import read_weights

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Ordinary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.tied = self.linear.weight
        self.layers = nn.ModuleList([nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)])
        self.register_buffer("transposed", torch.arange(6, dtype=torch.int32).view(2, 3).T)
        self.sizes, self.scale, self.table = [1, 2], 3.0, {"a": torch.ones(2)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.linear(x) * self.scale * self.sizes[0] + self.table["a"].sum()


class Harmful(nn.Module):
    """Prints its words while torch.jit.load reads it."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words, self.weight = words, torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool, Tensor]:
        return self.words, self.training, self.weight

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool, Tensor]) -> None:
        self.words, self.training, self.weight = state[0], state[1], state[2]
        print(state[0])


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "model.pt"
    torch.jit.script(Ordinary()).save(str(path))
    return path


def test_torchscript_tensors_are_those_that_torch_reads(archive: Path) -> None:
    expected, found = torch.jit.load(str(archive)).state_dict(), read_weights(archive)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_torchscript_code_is_not_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.jit.script(Harmful("harm")).save(str(tmp_path / "harm.pt"))
    with pytest.raises(FinesslError, match="holds no named tensors"):
        read_weights(tmp_path / "harm.pt")
    assert "harm" not in capfd.readouterr().out
    torch.jit.load(str(tmp_path / "harm.pt"))
    assert "harm" in capfd.readouterr().out  # torch itself runs it


def rewritten(source: Path, target: Path, changed: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, changed.get(name.partition("/")[2], old.read(name)))
    return target


class Touch:
    def __init__(self, path: Path) -> None:
        self.words = path

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return Path.touch, (self.words,)


def test_torchscript_with_a_foreign_pickle_is_refused(archive: Path, tmp_path: Path) -> None:
    harmful = {"data.pkl": pickle.dumps(Touch(tmp_path / "harm"), 2)}
    with pytest.raises(FinesslError, match=r"asks for .*\.getattr, which may do harm: refused\. Save its state_dict"):
        read_weights(rewritten(archive, tmp_path / "a.pt", harmful))
    memo = b"\x80\x02Nr\xff\xff\xff\x7f."  # one value, kept in slot 2,147,483,647: 34 GB for the table of slots
    with pytest.raises(FinesslError, match="more memory than it can need"):
        read_weights(rewritten(archive, tmp_path / "b.pt", {"data.pkl": memo}))
    assert not (tmp_path / "harm").exists()


def test_archive_that_claims_more_bytes_than_it_has(archive: Path, tmp_path: Path) -> None:
    bomb = rewritten(archive, tmp_path / "bomb.pt", {"data/0": bytes(1 << 22)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(FinesslError, match="claims more bytes than the file has"):
        read_weights(bomb)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1).expand(1 << 40), torch.empty(1 << 40, device="meta"), torch.eye(3).to_sparse()],
    ids=["expanded", "meta", "sparse"],
)
def test_tensors_larger_than_their_bytes_are_refused(tmp_path: Path, tensor: Tensor) -> None:
    torch.save({"weight": tensor}, tmp_path / "w.pt")
    with pytest.raises(FinesslError, match="weight is no ordinary tensor|cannot be read as weights"):
        read_weights(tmp_path / "w.pt")


@pytest.mark.parametrize("kind", ["script", "torch", "legacy", "safetensors"])
def test_damaged_file_gives_tensors_or_a_sentence(archive: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pt")
    state = {"a": torch.arange(40.0).view(5, 8), "b": torch.ones(3, dtype=torch.float16)}
    if kind == "script":
        path.write_bytes(archive.read_bytes())
    elif kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "torch")
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(400):
        data = bytearray(whole[: rng.integers(len(whole))] if rng.random() < 0.3 else whole)
        for place in rng.integers(0, max(len(data), 1), rng.integers(1, 6)):
            data[place : place + 1] = bytes([rng.integers(256)])
        path.write_bytes(data)
        try:
            assert read_weights(path)
        except FinesslError as error:
            assert str(path) in str(error) and "\n" not in str(error)


def test_weights_that_the_system_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w.pt").write_bytes(b"x")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(FinesslError, match=r"w\.pt cannot be read: Permission denied"):
        read_weights(tmp_path / "w.pt")


def test_pipe_is_no_weights_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.pt")
    with pytest.raises(FinesslError, match="no weights file"):
        read_weights(tmp_path / "w.pt")
