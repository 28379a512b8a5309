"""Weights files: code in pickles and TorchScript, cut and spoilt files, tensors that do not fit."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from fuzz.base import FAST
from fuzz.damage import VALUES, spoil
from fuzz.harness import Box, kind

BACKBONE = "test_vit"  # the smallest of timm


class Code:
    """Pickles to a call that makes the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.canary),)


def scripted(canary: Path, path: Path) -> None:
    """A TorchScript archive whose __setstate__ writes the canary while it is loaded."""
    source = f"""
import torch
class Evil(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
    @torch.jit.export
    def __getstate__(self):
        return (self.weight, self.training)
    @torch.jit.export
    def __setstate__(self, state: Tuple[torch.Tensor, bool]):
        torch.from_file({str(canary)!r}, True, 64).copy_(torch.ones(64))
        self.weight = state[0]
        self.training = state[1]
    def forward(self, x):
        return x * self.weight
"""
    # TorchScript compiles from a source file.
    module = path.with_suffix(".py")
    module.write_text("from typing import Tuple\n" + source)
    import importlib.util

    specification = importlib.util.spec_from_file_location("fuzz_evil", module)
    assert specification and specification.loader
    loaded = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(loaded)
    torch.jit.script(loaded.Evil()).save(str(path))
    canary.unlink(missing_ok=True)


def torch_file(content: object, legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def state() -> dict[str, torch.Tensor]:
    import timm

    return timm.create_model(BACKBONE, num_classes=0).state_dict()


def make(box: Box, path: Path) -> None:
    rng = box.rng
    how = rng.choice(
        (
            "script",
            "pickle",
            "pickle",
            "wrapped",
            "safetensors",
            "safetensors",
            "torch",
            "torch",
            "tensors",
            "tensors",
            "other",
        )
    )
    legacy = rng.random() < 0.3
    if how == "script":
        scripted(box.canary, path)
    elif how == "pickle":
        path.write_bytes(rng.choice((pickle.dumps(Code(box.canary)), torch_file(Code(box.canary), legacy))))
    elif how == "wrapped":
        path.write_bytes(torch_file({"state_dict": {**state(), "x": Code(box.canary)}}, legacy))
    elif how == "safetensors":
        path.write_bytes(spoil(rng, save(state())))
    elif how == "torch":
        path.write_bytes(spoil(rng, torch_file(state(), legacy)))
    elif how == "tensors":
        path.write_bytes(odd_tensors(box, path.suffix == ".safetensors", legacy))
    else:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(
                "archive/data.pkl", rng.choice((b"", pickle.dumps(Code(box.canary)), bytes(50_000_000), b"\x80\x02."))
            )
            archive.writestr("archive/constants.pkl", b"\x80\x02).")
            archive.writestr("archive/version", b"3\n")
        path.write_bytes(
            rng.choice(
                (
                    buffer.getvalue(),
                    b"",
                    b"<html>404</html>",
                    bytes(2000),
                    b"\xff" * 8 + b"{}",
                    b"\x08" + bytes(7) + b"{}      ",
                )
            )
        )


def odd_tensors(box: Box, safe: bool, legacy: bool) -> bytes:
    """A whole file with one tensor of another shape, kind, name or value."""
    rng, tensors = box.rng, state()
    name = rng.choice(sorted(tensors))
    how = rng.choice(("shape", "kind", "nan", "complex", "empty", "name", "less", "int8", "none", "list"))
    if how == "shape":
        tensors[name] = torch.zeros(rng.choice(((0,), (1,), (3, 5), (2, 2, 2, 2, 2))))
    elif how in ("kind", "complex", "int8"):
        tensors[name] = tensors[name].to({"kind": torch.int64, "complex": torch.complex64, "int8": torch.int8}[how])
    elif how == "nan":
        tensors[name] = torch.full_like(tensors[name], float("nan"))
    elif how == "empty":
        tensors = {}
    elif how == "name":
        tensors[rng.choice(("x", "", "head.weight", "module.", "vision_model.x", "a" * 10_000, "é\n"))] = torch.zeros(2)
    elif how == "less":
        del tensors[name]
    if how in ("none", "list") and not safe:
        return torch_file({**tensors, name: rng.choice((None, [1], "x", 3))} if how == "none" else [tensors], legacy)
    return save(tensors) if safe else torch_file(tensors, legacy)


@kind("weights", 6)
def weights(box: Box) -> None:
    path = box.folder / f"weights{box.rng.choice(('.pt', '.pth', '.bin', '.safetensors'))}"
    make(box, path)
    out = box.folder / "run"
    if box.rng.random() < 0.25:
        strange_run(box, path)
        return
    verb = box.rng.choice(("train", "train", "inspect"))
    if verb == "inspect":
        box.run("inspect", box.base / "photos", "--backbone", BACKBONE, "--weights", path, "--device", "cpu")
        return
    result = box.run(
        "train",
        box.base / "photos",
        "--out",
        out,
        *FAST,
        "--image-size",
        "32",
        "--backbone",
        BACKBONE,
        "--weights",
        path,
    )
    box.expect(result.ok or not (out / "classifier").exists(), "refused weights left a classifier")


def strange_run(box: Box, path: Path) -> None:
    """A stranger's run names its weights, and everything else that it likes."""
    run = box.copy("done")
    description = run / "classifier" / "classifier.json"
    content = json.loads(description.read_text())
    content["weights"] = str(path)
    if box.rng.random() < 0.5:
        content["backbone"] = box.rng.choice(
            (BACKBONE, "hf_hub:stranger/evil", "local-dir:" + str(box.folder), "../x", "")
        )
    if box.rng.random() < 0.5:
        key = box.rng.choice(sorted(content))
        content[key] = box.rng.choice([value for value in VALUES if value not in (None, True)])
    description.write_text(json.dumps(content), errors="surrogatepass")
    result = box.run("predict", run, box.base / "photos" / "unlabeled", "--device", "cpu")
    box.expect("nan" not in result.out, f"predict printed nan: {result.out}")


@kind("text-features", 1)
def text_features(box: Box) -> None:
    """FILE.npy of class features, with objects, other shapes or spoilt bytes."""
    path = box.folder / "text.npy"
    how = box.rng.choice(("object", "shape", "nan", "spoilt", "npz", "kind"))
    if how == "object":
        np.save(path, np.array([Code(box.canary)], object), allow_pickle=True)
    elif how == "npz":
        with open(path, "wb") as file:
            np.savez(file, a=np.array([Code(box.canary)], object))
    else:
        shape = (3, 192) if how != "shape" else box.rng.choice(((0,), (3,), (2, 5), (3, 4, 5), (10**6, 2)))
        array = np.ones(shape, np.float32) * (np.nan if how == "nan" else 1)
        np.save(path, array.astype("U3") if how == "kind" else array)
        if how == "spoilt":
            path.write_bytes(spoil(box.rng, path.read_bytes()))
    result = box.run(
        "train", box.base / "photos", "--out", box.folder / "run", *FAST, "--head-init", "text", "--text-features", path
    )
    box.expect(not result.ok or "nan" not in result.out.lower(), f"trained with text features of NaN: {result.out}")
