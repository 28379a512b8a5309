"""The tensors of a TorchScript archive (OpenAI's format of CLIP), read without executing its code.

The archive is a zip file: <name>/data.pkl describes the module, <name>/data/<key> holds the bytes of each tensor. The
program, <name>/code/…, is not read; `torch.jit.load` would execute parts of it while loading.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finessl.errors import FinesslError
from finessl.runtime.pickles import load_pickle

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class Module:
    """Stand-in for every class of the archive; only its attributes are read."""

    __slots__ = ("state",)

    def __setstate__(self, state: object) -> None:
        self.state = state


class Rebuild:
    """torch._utils._rebuild_tensor_v2."""

    __slots__ = ()

    def __call__(self, storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
        if math.prod(size) > storage.numel():
            raise FinesslError("has a tensor larger than its bytes: refused.")
        return torch.as_strided(storage, size, stride, offset)  # checks the bounds


class Unchanged:
    """torch.jit._pickle.build_intlist, restore_type_tag and similar: the value, without its type tag."""

    __slots__ = ()

    def __call__(self, value: Any, *_: Any) -> Any:
        return value


class Mapped:
    """collections.OrderedDict."""

    __slots__ = ()

    def __call__(self) -> dict[Any, Any]:
        return {}


def find(module: str, name: str) -> Any:
    if module.startswith("__torch__"):
        return Module
    if module == "torch" and name in STORAGES:
        return STORAGES[name]
    if module == "torch.jit._pickle":
        return Unchanged()
    return {("torch._utils", "_rebuild_tensor_v2"): Rebuild(), ("collections", "OrderedDict"): Mapped()}[module, name]


def read_torchscript(path: Path) -> dict[str, Tensor] | None:
    """All tensors of the archive by name; None for a file that is not a TorchScript archive."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        held = sum(info.file_size for info in archive.infolist() if "/code/" not in info.filename)
        if held > path.stat().st_size:  # PyTorch does not compress tensors
            raise FinesslError("claims more bytes than the file has: refused.")
        top = next((n.partition("/")[0] for n in archive.namelist() if n.endswith("/constants.pkl")), None)
        if top is None:
            return None
        if f"{top}/byteorder" in archive.namelist() and archive.read(f"{top}/byteorder") != b"little":
            raise FinesslError("was written on a big-endian machine, which is not supported.")
        storages: dict[str, Tensor] = {}

        def storage(saved: tuple[str, torch.dtype, str, str, int]) -> Tensor:
            _, dtype, key, _, _ = saved
            if key not in storages:
                content = bytearray(archive.read(f"{top}/data/{key}"))
                storages[key] = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
            return storages[key]

        return dict(tensors_of(load_pickle(archive.read(f"{top}/data.pkl"), find, persistent=storage)))


def tensors_of(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor), with the names of the module's state dict."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Module) and isinstance(attributes := getattr(value, "state", None), dict):
        for key, part in attributes.items():
            yield from tensors_of(part, f"{name}.{key}" if name else str(key))
