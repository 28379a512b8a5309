"""Recipes and options: every field with values of the wrong kind or size, and spoilt TOML."""

from __future__ import annotations

import json
import math
from pathlib import Path

from finessl.methods import METHODS
from fuzz.base import FAST, SMALL
from fuzz.damage import TEXTS, spoil
from fuzz.harness import Box, kind

TINY = {
    "data": {"image_size": 32}, "model": {"backbone": "test_vit", "pretrained": False}, "tuning": {"name": "linear"},
    "method": {"name": "supervised"}, "train": {"steps": 2, "batch_size": 2},
}  # fmt: skip
FIELDS = (
    "seed", "data.image_size", "data.statistics", "data.weak", "data.strong", "data.strong_views", "data.test",
    "data.root", "data.strict",
    "data.labeled_in_unlabeled", "source.name", "source.download", "split.name", "split.labels_per_class",
    "split.ratio", "split.file",
    "model.backbone", "model.weights", "model.pretrained", "tuning.name", "tuning.length", "tuning.rank",
    "tuning.dim", "head.name", "head.init",
    "head.scale", "head.text_features", "method.name", "method.alpha", "method.threshold", "method.temperature",
    "method.momentum",
    "method.aux_threshold", "train.steps", "train.epoch_steps", "train.batch_size", "train.mu", "train.optimizer",
    "train.lr",
    "train.backbone_lr", "train.momentum", "train.nesterov", "train.weight_decay", "train.schedule", "train.warmup",
    "train.clip_norm",
    "train.precision", "train.cache_features",
)  # fmt: skip
NAMES = (
    "typo",
    "train.typo",
    "train.typo.lr",
    "train",
    "",
    ".",
    "..",
    "train.",
    ".lr",
    "method.alpha.x",
    "train.lr=",
    "é.ü",
    "a" * 300,
    "[train]",
)
OPTIONS = (
    "--lr", "--steps", "--batch-size", "--mu", "--image-size", "--strong-views", "--seed", "--labels-per-class",
    "--cache-features",
    "--method", "--tuning", "--backbone", "--head", "--head-init", "--split", "--weights", "--text-features",
    "--recipe", "--precision",
    "--device", "--checkpoint-seconds", "--eval-every", "--test", "--root", "--cache-dir",
)  # fmt: skip


@kind("options", 10)
def options(box: Box) -> None:
    rng = box.rng
    changes: list[str] = []
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.4:
            changes += [rng.choice(OPTIONS), rng.choice(TEXTS)]
        else:
            name = rng.choice(FIELDS if rng.random() < 0.85 else NAMES)
            changes += ["--set", f"{name}={rng.choice(TEXTS)}"]
    method = ["--method", rng.choice(METHODS.names())] if rng.random() < 0.5 else []
    train_with(box, [*method, *(text.replace("\0", "") for text in changes)])


def train_with(box: Box, changes: list[str]) -> None:
    out = box.folder / "run"
    command = ["train", box.base / "photos", "--out", out, *FAST]
    result = box.run(*command, *changes)
    if result.ok and (out / "metrics.jsonl").exists():
        check_trained(box, out)
        again = box.run("resume", out, "--device", "cpu")  # what was saved is what was run
        box.expect(again.ok, f"the run cannot be resumed: {again.err}")
    elif not result.ok and box.rng.random() < 0.3:
        box.refused = True
        box.run(*command, must="work")  # a refused command spoils nothing


def check_trained(box: Box, out: Path) -> None:
    """Figures are numbers, and training went downhill as far as two steps can tell."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        bad = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        box.expect(not bad, f"metrics.jsonl holds {bad} that are not finite: {row}")
    box.expect(
        bool(json.loads((out / "meta.json").read_text()).get("finished")), "the run ended well and is not finished"
    )


@kind("recipes", 8)
def recipes(box: Box) -> None:
    rng = box.rng
    path = box.folder / "recipe.toml"
    lines = tiny_toml()
    for _ in range(rng.randint(1, 3)):
        spot = rng.randrange(len(lines) + 1)
        how = rng.choice(("value", "value", "value", "line", "remove", "section", "double"))
        section, _, name = rng.choice(FIELDS).rpartition(".")
        if how == "value":
            lines += [f"[{section}]" if section else "", f"{name} = {rng.choice(TEXTS)}"]
        elif how == "line":
            lines.insert(spot, rng.choice(TEXTS))
        elif how == "remove" and spot < len(lines):
            del lines[spot]
        elif how == "section":
            lines.insert(
                spot,
                rng.choice(
                    ("[train]", "[[train]]", "[train.lr]", "[typo]", "[]", "train = 3", "seed = {}", "[data.source]")
                ),
            )
        elif lines:
            lines.insert(spot, rng.choice(lines))
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    if rng.random() < 0.25:
        data = spoil(rng, data)
    path.write_bytes(data)
    out = box.folder / "run"
    # Options that keep the training short.
    result = box.run("train", box.base / "photos", "--out", out, "--recipe", path, *SMALL, "--steps", "2")
    if result.ok:
        check_trained(box, out)


def tiny_toml() -> list[str]:
    lines: list[str] = ["seed = 1"]
    for section, values in TINY.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    return lines
