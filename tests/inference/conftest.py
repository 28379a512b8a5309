"""Runs of a network so small that exporting it takes a second or two."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

import finessl

ARGUMENTS = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
MakeRun = Callable[..., Path]


@pytest.fixture(scope="session")
def small_backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A transformer of two blocks with random weights, as a folder of timm's."""
    folder = tmp_path_factory.mktemp("backbone")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **ARGUMENTS)
    save_file(model.state_dict(), folder / "model.safetensors")
    config = {
        "num_classes": 0,
        "input_size": [3, 32, 32],
        "fixed_input_size": True,
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
    }
    described = {"architecture": "vit_tiny_patch16_224", "num_classes": 0, "model_args": ARGUMENTS}
    (folder / "config.json").write_text(json.dumps({**described, "pretrained_cfg": config}))
    return f"local-dir:{folder}"


@pytest.fixture(scope="session")
def make_run(small_backbone: str, shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """A finished run of two steps with this tuning and head; the same one when asked again."""
    made: dict[tuple[str, str], Path] = {}

    def make(tuning: str = "lora", head: str = "linear") -> Path:
        if (tuning, head) not in made:
            out = tmp_path_factory.mktemp("runs") / tuning
            finessl.train(
                str(shapes), out=str(out), backbone=small_backbone, tuning=tuning, head=head, steps=2,
                labels_per_class=2, batch_size=4, lr=0.05, device="cpu", quiet=True,
            )  # fmt: skip
            made[tuning, head] = out
        return made[tuning, head]

    return make
