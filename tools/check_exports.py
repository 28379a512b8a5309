"""Exports of real runs, loaded without finessl: python tools/check_exports.py [--work DIR] [--runs NAMES]

(make export-check)

Trains short runs on the sample, exports each in every format it allows, makes a virtual environment without finessl,
and compares logits and classes on 500 sample images there. Needs pip and a package index; torch takes a while. The versions
are the newest, or those in the file that PIP_CONSTRAINT names.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import numpy as np
from PIL import Image

import finessl
from finessl.data.sources import open_dataset
from finessl.errors import FinesslError
from finessl.inference.export import export_run

SHORT = ["--batch-size", "8", "--steps", "20"]
RUNS = {
    "lora": ["train", *SHORT, "--tuning", "lora", "--head", "linear"],
    "lora-cosine": ["train", *SHORT, "--tuning", "lora"],
    "ssf": ["train", *SHORT, "--tuning", "ssf", "--head", "linear"],
    "adaptformer": ["train", *SHORT, "--tuning", "adaptformer"],
    "vpt-deep": ["train", *SHORT, "--tuning", "vpt-deep"],
    "quick": ["quick"],
}
PACKAGES = {"onnx": ["numpy", "pillow", "onnxruntime"], "torch": ["numpy", "pillow", "torch", "timm"]}
IMAGES = 500

# What runs in the clean environment: logits of all images, from the export alone.
CHECK = """
import importlib.util, json, sys
from pathlib import Path
import numpy as np
assert importlib.util.find_spec("finessl") is None
folder, images, kind = Path(sys.argv[1]), sorted(Path(sys.argv[2]).glob("*.png")), sys.argv[3]
if kind == "timm":
    import timm, torch
    from PIL import Image
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    with torch.no_grad():
        logits = model(torch.stack([transform(Image.open(file)) for file in images])).numpy()
else:
    spec = importlib.util.spec_from_file_location("predict", folder / "predict.py")
    predict = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(predict)
    logits = np.concatenate([predict.predict(images[i : i + 50])[1] for i in range(0, len(images), 50)])
np.save(sys.argv[4], logits)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="keep runs, exports and environments here")
    parser.add_argument("--runs", default=",".join(RUNS), help="which runs, with commas")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="finessl-exports-"))
    images = write_images(work / "images")
    pythons = {name: environment(work / f"venv-{name}", packages) for name, packages in PACKAGES.items()}
    failed = 0
    for name in options.runs.split(","):
        run = make_run(work / "runs" / name, list(RUNS[name]))
        expected = finessl.load(run, device="cpu", precision="fp32").logits(sorted(images.glob("*.png")))
        for kind in ("onnx", "pt2", "timm"):
            out = work / "exports" / f"{name}-{kind}"
            try:
                if not out.exists():
                    export_run(run, out, format=kind)
            except FinesslError as error:
                print(f"{name:12} {kind:5} refused: {error}", flush=True)
                continue
            result = work / f"{name}.npy"
            python = pythons["onnx" if kind == "onnx" else "torch"]
            subprocess.run([python, "-I", "-c", CHECK, out, images, kind, result], check=True, cwd=work)
            logits = np.load(result)
            agreement = float((logits.argmax(1) == expected.argmax(1)).mean())
            failed += agreement < 1
            largest = np.abs(logits - expected).max()
            print(f"{name:12} {kind:5} agreement {agreement:.2%}, max |Δ logit| {largest:.1e}", flush=True)
    sys.exit(1 if failed else 0)


def write_images(folder: Path) -> Path:
    sample = open_dataset("sample")
    assert sample.test is not None
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(min(IMAGES, len(sample.test))):
        Image.fromarray(sample.test.read(i)).save(folder / f"{i:04d}.png")
    return folder


def environment(folder: Path, packages: list[str]) -> Path:
    python = folder / "bin" / "python"
    if not python.exists():
        try:
            venv.create(folder, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # half of the packages would be taken for all
            raise
    return python


def make_run(run: Path, words: list[str]) -> Path:
    verb, *settings = words
    settings += ["--out", str(run), "--backbone", "embedded", "-n", "4", "--device", "cpu", "-q"]
    if not (run / "classifier").exists():
        subprocess.run([sys.executable, "-m", "finessl", verb, "sample", *settings], check=True)
    return run


if __name__ == "__main__":
    main()
