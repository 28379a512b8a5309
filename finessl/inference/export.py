"""`finessl export`: a finished run as files that need no finessl.

onnx    one graph from pixels to probabilities, for ONNX Runtime
pt2     the same graph, for PyTorch alone (torch.export)
timm    the weights in timm's folder layout, for timm.create_model("local-dir:…")

Every export is read back from its files and compared with the run on real images. A folder appears under its name only
when it is complete and agrees.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finessl.errors import FinesslError
from finessl.inference.agreement import GATES, Agreement, Logits, compare, real_images
from finessl.inference.classifier import Classifier, load
from finessl.inference.evaluate import run_folder
from finessl.registry import Registry, nearest
from finessl.runs.directory import RunDirectory
from finessl.runtime.callbacks import Log
from finessl.runtime.files import sync_folder, writing
from finessl.runtime.version import __version__

PRECISIONS = tuple(GATES)


@dataclass(frozen=True)
class Options:
    """What a format may be asked for; one that cannot refuses it."""

    run: Path
    precision: str = "fp32"
    opset: int | None = None


# Writes the files of an export into a folder; returns the logits that those files give, and facts for export.json.
Writer = Callable[[Classifier, Path, Options], tuple[Logits, dict[str, Any]]]

FORMATS = Registry(
    "export format",
    {
        "onnx": ("finessl.inference.export_onnx:write", "model.onnx, for ONNX Runtime; every tuning and head"),
        "pt2": ("finessl.inference.export_pt2:write", "model.pt2, for PyTorch alone; every tuning and head"),
        "timm": ("finessl.inference.export_timm:write", "timm's folder; tuning that merges into weights, linear head"),
    },
    plugins=False,
)


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    format: str = "onnx",
    precision: str = "fp32",
    opset: int | None = None,
    weights: str | None = None,
    log: Log | None = None,
) -> Agreement:
    """Write the classifier of a finished run to the folder `out`, which must be new or empty.

    format: an entry of FORMATS.   precision: fp32; for onnx also fp16, int8 and int8-dynamic.   opset: of ONNX.
    weights: the backbone's file, if it moved. The result says how far the files agree with the run; where that is not
    far enough, nothing is written.
    """
    write: Writer = FORMATS[format]
    if precision not in PRECISIONS:
        raise FinesslError(
            f"there is no export precision {precision!r}{nearest(precision, PRECISIONS) or ';'} "
            f"choose {', '.join(PRECISIONS)}."
        )
    if format != "onnx" and (precision != "fp32" or opset is not None):
        asked = "precision" if precision != "fp32" else "opset"
        raise FinesslError(f"--format {format} has no {asked} to choose: its numbers are fp32. Use --format onnx.")
    classifier = load(run, weights=weights, device="cpu", precision="fp32")
    with new_folder(Path(out)) as folder:
        logits, facts = write(classifier, folder, Options(Path(run), precision, opset))
        if log:
            log("comparing with the run")
        pixels, source = real_images(run, classifier.image_size)
        found = compare(lambda batch: classifier.logits(list(batch)), logits, pixels, source)
        gate = GATES[precision]
        if not found.passes(gate):
            limit = f", at most {gate.max_logit_difference:g}" if precision == "fp32" else ""
            raise FinesslError(
                f"nothing was written: the {format} export in {precision} does not agree with the run: {found} "
                f"(wanted: {gate.min_agreement:.1%}{limit}).{advice(precision)}"
            )
        description = {**describe(classifier, Path(run)), "format": format, "precision": precision, **facts}
        write_json(folder / "export.json", {**description, "check": found.as_dict()})
    return found


def advice(precision: str) -> str:
    return "" if precision == "fp32" else " Export with --precision fp32."


def describe(classifier: Classifier, run: Path | None = None) -> dict[str, Any]:
    """What a program needs to know to use the export, and where the export comes from."""
    about = classifier.description
    described: dict[str, Any] = {
        "finessl": __version__,
        "classes": classifier.classes,
        "image_size": classifier.image_size,
        "resize": "squash to image_size x image_size, bilinear with antialiasing (Pillow); upright, white background",
        "input": "uint8 RGB [n, image_size, image_size, 3]; mean and std are applied inside",
        "mean": about["mean"],
        "std": about["std"],
        "temperature": classifier.temperature,
        "backbone": about["backbone"],
        "tuning": about["tuning"],
        "head": about["head"],
    }
    if run is not None:
        meta = RunDirectory(run_folder(run)).meta()
        described["run"] = {name: meta[name] for name in ("accuracy", "test", "labeled", "unlabeled") if name in meta}
    return described


def write_json(path: Path, content: dict[str, Any]) -> None:
    """ASCII: class names may hold anything that a folder's name may, also bytes that are no text."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="ascii")


def copy_script(name: str, folder: Path) -> None:
    shutil.copyfile(Path(__file__).parent / "scripts" / name, folder / "predict.py")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `out` when the block ends without an error and vanishes otherwise."""
    with writing(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise FinesslError(f"{out} exists already; nothing is overwritten. Choose another --out, or remove it.")
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
        try:
            yield folder
            for file in folder.rglob("*"):
                if file.is_file():
                    with open(file, "rb+") as written:
                        os.fsync(written.fileno())
            umask = os.umask(0)
            os.umask(umask)
            folder.chmod(0o777 & ~umask)  # mkdtemp makes it private
            os.rename(folder, out)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        sync_folder(out.parent)
