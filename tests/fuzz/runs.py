"""Run directories of strangers and of failing disks: each file cut, spoilt, gone, swapped or of another kind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np

from fuzz.damage import DEEP, spoil, spoil_tree
from fuzz.harness import Box, Fault, kind

FIGURES = (
    "accuracy",
    "pseudo-labels",
    "pseudo-label-quality",
    "confidence",
    "calibration",
    "sensitivity",
    "strategies",
    "confusion",
)


def damage(box: Box, path: Path) -> bool:
    """Spoil a file; True if its bytes were damaged at random, so that a checksum must notice or nothing may change."""
    rng = box.rng
    how = rng.choice(
        ("bytes", "bytes", "bytes", "tree", "tree", "tree", "gone", "folder", "fifo", "link", "swap", "deep")
    )
    if how == "tree" and path.suffix in (".json", ".jsonl") and path.stat().st_size:
        first, *rest = path.read_text().splitlines(keepends=True) if path.suffix == ".jsonl" else [path.read_text()]
        text = json.dumps(spoil_tree(rng, json.loads(first)))
        path.write_text(text + "\n" + "".join(rest), encoding="utf-8", errors="surrogatepass")
        return False
    if how == "deep":
        path.write_text(rng.choice((DEEP, "{" * 5000, '{"a":' * 5000)))
    elif how == "swap":
        others = [p for p in path.parents[1].rglob("*") if p.is_file() and p != path]
        path.write_bytes(rng.choice(others).read_bytes())
    elif how in ("gone", "folder", "fifo", "link"):
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "fifo":
            os.mkfifo(path)
        elif how == "link":
            os.symlink(rng.choice((path.name, "gone", "/dev/zero", "/etc/passwd")), path)
    else:
        path.write_bytes(spoil(rng, path.read_bytes()))
    return True


def files_of(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file() and path.suffix != ".html")


@kind("run-directories", 12)
def finished_runs(box: Box) -> None:
    run = box.copy("done")
    path = box.rng.choice(files_of(run))
    if box.rng.random() < 0.05:
        (run / "evil.py").write_text(f"open({str(box.canary)!r}, 'w')")
        path = run / "recipe.toml"
        path.write_text(f'plugins = ["{run / "evil.py"}"]\n' + path.read_text())
        by_chance = False
    elif path.name == "classifier.safetensors" and box.rng.random() < 0.3:
        spoil_tensors(box, path)
        by_chance = True
    else:
        by_chance = damage(box, path)
    verb = box.rng.choice(("predict", "predict", "evaluate", "evaluate", "report", "resume", "figure"))
    if verb == "predict":
        result = box.run("predict", run, box.base / "photos" / "unlabeled", "--device", "cpu")
        box.expect("nan" not in result.out, f"predict printed nan after damage to {path.name}")
        expected = (box.base / "predict.txt").read_text()
        box.expect(
            not (result.ok and by_chance) or result.out == expected,
            f"predict changed after damage to {path.name}: {result.out}",
        )
    elif verb == "evaluate":
        result = box.run("evaluate", run, "--json", "--device", "cpu")
        box.expect("nan" not in result.out.lower(), f"evaluate printed nan after damage to {path.name}")
        if result.ok and by_chance:
            same = json.loads(result.out) == json.loads((box.base / "evaluate.txt").read_text())
            box.expect(same, f"evaluate changed after damage to {path.name}: {result.out}")
    elif verb == "report":
        result = box.run("report", run, "--out", box.folder / "report.html")
        box.expect(not result.ok or (box.folder / "report.html").stat().st_size > 1000, "an empty report")
    elif verb == "figure":
        name = box.rng.choice(FIGURES)
        box.run("figure", name, run, "--out", box.folder / "figures")
    else:
        box.run("resume", run, "--device", "cpu")


def spoil_tensors(box: Box, path: Path) -> None:
    """A whole safetensors file with another content."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    name = box.rng.choice(sorted(tensors))
    how = box.rng.choice(("nan", "shape", "gone", "more", "kind"))
    if how == "nan":
        tensors[name] = np.full_like(tensors[name], np.nan)
    elif how == "shape":
        tensors[name] = np.ones((3, 5), np.float32)
    elif how == "gone":
        del tensors[name]
    elif how == "more":
        tensors["more"] = np.ones(3, np.float32)
    else:
        tensors[name] = tensors[name].astype(np.int64)
    save_file(tensors, path)


@kind("unfinished-runs", 5)
def unfinished_runs(box: Box) -> None:
    """Damage between a kill and the resume: refused, or the same result as without it."""
    run = box.copy("half")
    path = box.rng.choice(files_of(run))
    by_chance = damage(box, path)
    result = box.run("resume", run, "--device", "cpu")
    if not result.ok:
        return
    if by_chance:
        compare_runs(box, run, box.base / "whole", f"after damage to {path.relative_to(run)}")
    else:
        box.expect((run / "classifier" / "classifier.safetensors").exists(), "resumed to an end without a classifier")


def compare_runs(box: Box, run: Path, whole: Path, when: str) -> None:
    """Metrics and the trained parameters byte for byte."""
    for name in ("metrics.jsonl", "classifier/classifier.safetensors"):
        if not (run / name).exists():
            raise Fault("silent", f"{name} is missing {when}")
        box.expect((run / name).read_bytes() == (whole / name).read_bytes(), f"{name} differs {when}")


@kind("groups-of-runs", 2)
def groups(box: Box) -> None:
    """A report or a grid over several directories, one of them damaged."""
    folder = box.folder / "runs"
    for name in ("done", "whole", "half"):
        shutil.copytree(box.base / name, folder / name)
    damage(box, box.rng.choice(files_of(folder / box.rng.choice(("done", "whole", "half")))))
    if box.rng.random() < 0.5:
        box.run("report", folder, "--out", box.folder / "report.html", "--no-images")
    else:
        box.run(
            "figure",
            box.rng.choice(FIGURES),
            folder,
            "--out",
            box.folder / "figures",
        )
