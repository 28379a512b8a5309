"""Checkpoints that are whole or absent.

A checkpoint is a folder `step-000500/` with `trained.safetensors` (the trained parameters and the buffers that move),
`state.pt` (optimizer, method, counters; loaded with weights_only=True) and `manifest.json` (size and SHA-256 of both).
It is written under a temporary name and renamed when all of it is on the disk; the newest whole one is used, so a
crash at any moment costs at most the steps since the checkpoint before.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finessl.training.rundir import sync_folder, writing

KEEP = 2  # the newest, and one to fall back on


def save(folder: Path, step: int, trained: dict[str, Tensor], state: dict[str, Any]) -> Path:
    target = folder / f"step-{step:08d}"
    partial = folder / f".partial-{step:08d}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_file({n: t.detach().cpu().contiguous() for n, t in trained.items()}, partial / "trained.safetensors")
        torch.save(state, partial / "state.pt")
        names = ("trained.safetensors", "state.pt")
        manifest = {
            name: {"bytes": (partial / name).stat().st_size, "sha256": digest(partial / name)} for name in names
        }
        (partial / "manifest.json").write_text(json.dumps(manifest))
        for file in partial.iterdir():
            with open(file, "rb+") as handle:
                os.fsync(handle.fileno())
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        sync_folder(folder)
        for old in sorted(folder.glob("step-*"))[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
    return target


def newest(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that is whole: (trained, state), or None."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        if whole(path):
            return load_file(path / "trained.safetensors"), torch.load(
                path / "state.pt", map_location="cpu", weights_only=True
            )
    return None


def whole(path: Path) -> bool:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        return bool(manifest) and all(digest(path / name) == entry["sha256"] for name, entry in manifest.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
