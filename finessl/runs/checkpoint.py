"""Checkpoints: whole or absent, and complete enough that a resumed run ends with the bytes of an uninterrupted one.

On disk. `step-00000500/` holds

    trained.safetensors    trained parameters and the buffers that change in training; frozen weights are not stored
    state.pt               everything else (below); loaded with weights_only=True, so that no code in it is executed
    manifest.json          size and SHA-256 of both files

The folder is written under a temporary name, synchronised to disk and renamed. A folder of this name is therefore whole,
and the digests find what a disk damages later. `newest` takes the newest whole checkpoint, so that a crash at any moment
costs at most the steps since then. Two are kept: the newest and one to fall back on.

Exact resume. A resumed run equals an uninterrupted one byte for byte (on one machine, on the CPU) only if every value that
decides a later step is restored or derived:

    step                Seeds of shuffling and augmentation are functions of (seed, step), and the learning rate is a
                        function of the step. No generator state is stored, and none can be forgotten.
    optimizer           Momentum; without it the first steps after a resume differ.
    method              Buffers: class paces, thresholds, moving averages, pseudo-labels.
    scaler              fp16's loss scale and the steps since it grew.
    diagnostics         Sums since the last line that was logged; the next line covers steps on both sides of the resume.
    metrics_size        Length of metrics.jsonl (and its SHA-256). Lines after it belong to steps that are trained again,
                        and are cut off.
    accuracy, latest, elapsed     What the next log line and meta.json show.

Caveats: a buffer that is registered as non-persistent, a Python attribute of a method that changes in training, or a
running mean in the logger is lost silently, and the runs differ some hundred steps later. Tests kill a run at several steps
and compare all files (tests/training/test_resume.py). Frozen weights come from the backbone's own file; its SHA-256 is
recorded in meta.json.

Reference: the same rule, a work directory is a run and the same command resumes it, in big_vision,
https://github.com/google-research/big_vision.
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

KEEP = 2  # checkpoints
TENSORS, STATE = "trained.safetensors", "state.pt"


class File(TypedDict):
    """An entry of manifest.json."""

    bytes: NonNegativeInt
    sha256: str


Manifest = dict[Literal["trained.safetensors", "state.pt"], File]


class State(TypedDict):
    """Schema of state.pt, as far as the loop reads it. Methods and optimizers check their own parts."""

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
    """Write folder/step-XXXXXXXX and remove all but the newest KEEP checkpoints.

    trained: tensors by name.   state: the other entries (see `State`).   Returns the checkpoint's folder.
    """
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
            shutil.rmtree(partial, ignore_errors=True)  # frees its space on a full disk
            raise
        sync_folder(folder)
        for old in sorted(folder.glob("step-*"))[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
    return target


def newest(
    folder: Path, usable: Callable[[dict[str, Any]], bool] = lambda state: True
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """(trained, state) of the newest checkpoint in `folder` that is whole and for whose state `usable` is true, or None."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        found = load(path)
        if found is not None and usable(found[1]):
            return found
    return None


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """(trained, state) of the checkpoint in the folder `path`; None if it is damaged. Nothing in its files is executed."""
    try:
        manifest = read_json(path / "manifest.json", Manifest)
        if len(manifest) < 2 or any(sha256(path / name) != entry["sha256"] for name, entry in manifest.items()):
            return None
        trained = load_tensors((path / TENSORS).read_bytes())  # load_file refuses paths that are not UTF-8
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        TypeAdapter(State).validate_python(state, strict=True)
    except Exception:  # torch.load raises any exception on bytes that it did not write
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
