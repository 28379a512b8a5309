"""Checkpoints that are whole or absent.

A checkpoint is a folder `step-000500/` with `trained.safetensors` (the trained parameters and the buffers that move),
`state.pt` (optimizer, method, counters; loaded with weights_only=True) and `manifest.json` (size and SHA-256 of both).
It is written under a temporary name and renamed when all of it is on the disk; the newest whole one is used, so a
crash at any moment costs at most the steps since the checkpoint before.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import TypedDict

from finessl.errors import FinesslError
from finessl.runs.directory import RESUMES, RunDirectory
from finessl.runs.metrics_log import holds_metrics
from finessl.runtime.files import read_json, sha256, sync_folder, writing

KEEP = 2  # the newest, and one to fall back on
TENSORS, STATE = "trained.safetensors", "state.pt"


class File(TypedDict):
    """An entry of manifest.json."""

    bytes: NonNegativeInt
    sha256: str


Manifest = dict[Literal["trained.safetensors", "state.pt"], File]


class State(TypedDict):
    """state.pt: what the loop itself reads; methods, optimizers and statistics check their own parts."""

    __pydantic_config__ = ConfigDict(extra="allow", arbitrary_types_allowed=True)  # type: ignore[misc]

    step: NonNegativeInt
    accuracy: float | None
    latest: dict[str, Any]
    metrics_size: NonNegativeInt
    elapsed: float
    diagnostics: dict[str, Any]
    optimizer: dict[Any, Any]
    method: dict[str, Any]
    scaler: dict[str, Any]


def save(folder: Path, step: int, trained: dict[str, Tensor], state: dict[str, Any]) -> Path:
    target = folder / f"step-{step:08d}"
    partial = folder / f".partial-{step:08d}"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in trained.items()}
    with writing(folder, RESUMES):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            save_file(tensors, partial / TENSORS)
            torch.save(state, partial / STATE)
            manifest = {
                name: {"bytes": (partial / name).stat().st_size, "sha256": sha256(partial / name)}
                for name in (TENSORS, STATE)
            }
            (partial / "manifest.json").write_text(json.dumps(manifest))
            for file in partial.iterdir():
                with open(file, "rb+") as handle:
                    os.fsync(handle.fileno())
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)  # on a full disk it would be in its own way
            raise
        sync_folder(folder)
        for old in sorted(folder.glob("step-*"))[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
    return target


def newest(
    folder: Path, usable: Callable[[dict[str, Any]], bool] = lambda state: True
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that is whole and `usable`: (trained, state), or None."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        found = load(path)
        if found is not None and usable(found[1]):
            return found
    return None


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """A checkpoint's tensors and state; None if it is damaged. Nothing in its files is run."""
    try:
        manifest = read_json(path / "manifest.json", Manifest)
        if len(manifest) < 2 or any(sha256(path / name) != entry["sha256"] for name, entry in manifest.items()):
            return None
        trained = load_tensors((path / TENSORS).read_bytes())  # load_file takes no path that is not UTF-8
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        TypeAdapter(State).validate_python(state, strict=True)
    except Exception:  # besides the errors of reading, torch.load raises anything on bytes that it did not write
        return None
    return trained, state


def newest_resumable(run: RunDirectory) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest whole checkpoint of a run whose metrics are still there: (trained, state), or None."""
    found = newest(run.checkpoints, lambda state: holds_metrics(run.metrics_file, state))
    if found is None and newest(run.checkpoints) is not None:
        raise FinesslError(
            f"{run.metrics_file} is cut or changed: it lacks lines that were written before the checkpoint. "
            f"Restore it, or remove {run.path} and train again."
        )
    return found


@contextlib.contextmanager
def fitting(run: RunDirectory, step: int) -> Iterator[None]:
    """Turn a checkpoint that does not fit the network, the optimizer or the method into an error that says so."""
    try:
        yield
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FinesslError(
            f"the checkpoint of step {step} in {run.path} does not fit its recipe and data "
            f"({str(error).splitlines()[0]}). Train again with another --out."
        ) from error
