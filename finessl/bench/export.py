"""`finessl bench export RUN`: ONNX Runtime against finessl's own prediction on the CPU, each with one thread.

The two take turns and CPU time counts, so that other programs on the machine hardly change the ratio.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

from finessl.bench.data import Rate
from finessl.errors import FinesslError
from finessl.inference.agreement import real_images
from finessl.inference.classifier import load
from finessl.inference.export import export_run
from finessl.inference.onnx_session import OPENVINO, OnnxClassifier, available_providers
from finessl.runtime.callbacks import Log
from finessl.runtime.precision import supports_bf16

OWN = ("fp32", "bf16")
EXPORTED = ("fp32", "int8", "int8-dynamic")


def bench_export(
    run: str | Path, *, batch: int = 32, repeats: int = 9, weights: str | None = None, log: Log | None = None
) -> list[Rate]:
    """Images per second of CPU time: each export that agrees with the run against finessl in fp32 and, where the CPU
    multiplies it, in bf16."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            predictors = {}
            for precision in EXPORTED:
                out = Path(folder) / precision
                try:
                    export_run(run, out, precision=precision, weights=weights)
                except FinesslError as error:
                    if precision == "fp32":
                        raise
                    if log:
                        log(str(error))
                    continue
                predictors[f"ONNX Runtime, {precision}"] = OnnxClassifier(out, threads=1).predict_proba
            if OPENVINO in available_providers():
                exported = OnnxClassifier(Path(folder) / "fp32", OPENVINO, threads=1)
                predictors["ONNX Runtime, OpenVINO"] = exported.predict_proba
            elif log:
                log(
                    "Not measured: ONNX Runtime with OpenVINO (pip install onnxruntime-openvino, in place of onnxruntime)."
                )
            own = [precision for precision in OWN if precision == "fp32" or supports_bf16(torch.device("cpu"))]
            for precision in own:
                classifier = load(run, weights=weights, device="cpu", precision=precision)
                predictors[f"finessl, {precision}"] = classifier.predict_proba
            images = list(real_images(run, classifier.image_size, batch)[0])
            if log and "ONNX Runtime, OpenVINO" in predictors:
                wanted, given = (
                    predictors[name](images).argmax(1) for name in ("finessl, fp32", "ONNX Runtime, OpenVINO")
                )
                log(
                    f"OpenVINO: same class as finessl in fp32 for {(wanted == given).mean():.1%} of {len(images)} images."
                )
            rates = turns({name: partial(f, images) for name, f in predictors.items()}, len(images), repeats)
    finally:
        torch.set_num_threads(threads)
    return [
        Rate(name, rates[name], f"finessl, {precision}", rates[f"finessl, {precision}"])
        for name in rates
        if name.startswith("ONNX")
        for precision in own
    ]


def turns(functions: dict[str, Callable[[], object]], images: int, repeats: int) -> dict[str, float]:
    """Images per second of CPU time of each function, the median of `repeats` rounds in which all take a turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(repeats + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if round_:  # the first warms up
                times[name].append(time.process_time() - start)
    return {name: images / median(taken) for name, taken in times.items()}
