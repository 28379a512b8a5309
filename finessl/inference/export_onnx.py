"""ONNX: the whole classifier as one file, model.onnx, with predict.py next to it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finessl.errors import FinesslError
from finessl.inference.agreement import Logits, unlabeled_images
from finessl.inference.classifier import Classifier
from finessl.inference.export import Options, copy_script, describe
from finessl.inference.graph import INPUT, OUTPUTS, ClassifierGraph, trace
from finessl.inference.onnx_session import open_session, require

OPSET = 18  # the first with everything that the graphs need; older runtimes can read it
CALIBRATION_IMAGES = 256

WEIGHTS_IN_INT8: dict[str, Any] = {
    "op_types_to_quantize": ["MatMul"],  # not the head, a Gemm: it is small and decides between similar classes
    "per_channel": True,
    "reduce_range": True,  # 7 bits: 8 overflow on a CPU without VNNI, whose answers would be others than those compared
    "extra_options": {
        "MatMulConstBOnly": True,
        "OpTypesToExcludeOutputQuantization": ["MatMul"],  # sums keep fp32, as they do with dynamic scales
    },
}


def write(classifier: Classifier, folder: Path, options: Options) -> tuple[Logits, dict[str, Any]]:
    opset = check_opset(options.opset)
    file, size = folder / "model.onnx", classifier.image_size
    with quiet():
        try:
            program = trace(ClassifierGraph(classifier), size)
            exported: Any = torch.onnx.export(
                program,
                dynamo=True,
                input_names=[INPUT],
                output_names=list(OUTPUTS),
                opset_version=opset,
                optimize=True,
                verify=False,
            )
            model = exported.model_proto
        except FinesslError:
            raise
        except Exception as error:  # the exporter raises types of its own for what it cannot translate
            raise FinesslError(
                f"{classifier.description['backbone']} cannot be translated to ONNX (opset {opset}): {first_line(error)} "
                "Try --format pt2."
            ) from error
    if opset not in [entry.version for entry in model.opset_import if entry.domain == ""]:  # the exporter only warns
        raise FinesslError(
            f"--opset {opset}: the installed onnxscript cannot write it; leave the option out for {OPSET}."
        )
    facts: dict[str, Any] = {"opset": opset, "outputs": list(OUTPUTS)}
    if options.precision == "fp16":
        model = to_fp16(model)
    save(model, file, classifier)
    if options.precision == "int8":
        pixels, source = calibration_images(options.run, size)
        quantize(file, pixels)
        facts["calibration"] = {"images": len(pixels), "source": source}
    elif options.precision == "int8-dynamic":
        quantize_dynamically(file)
    copy_script("predict_onnx.py", folder)
    session = open_session(file)
    return lambda batch: session.run(["logits"], {INPUT: batch})[0], facts


def calibration_images(run: Path, size: int) -> tuple[np.ndarray, str]:
    try:
        return unlabeled_images(run, size, CALIBRATION_IMAGES)
    except (FinesslError, OSError) as error:
        raise FinesslError(
            f"--precision int8 is calibrated on the run's unlabeled images. {error} Use --precision fp16 or fp32."
        ) from error


def check_opset(opset: int | None) -> int:
    require("export")
    from onnx.defs import onnx_opset_version

    newest = onnx_opset_version()
    if opset is not None and not OPSET <= opset <= newest:
        raise FinesslError(f"--opset {opset}: this finessl writes ONNX opsets {OPSET} to {newest}; default {OPSET}.")
    return opset or OPSET


def save(model: Any, file: Path, classifier: Classifier) -> None:
    import onnx

    if model.ByteSize() > onnx.checker.MAXIMUM_PROTOBUF:
        raise FinesslError("the model is over 2 GB, more than one ONNX file holds; use --format pt2.")
    onnx.helper.set_model_props(model, {"finessl": json.dumps(describe(classifier))})  # JSON escapes to ASCII
    model.producer_name = "finessl"
    onnx.save(model, str(file))


def to_fp16(model: Any) -> Any:
    """Weights and arithmetic in fp16; inputs and outputs keep their types."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with quiet():
        return convert_float_to_float16(model, keep_io_types=True)


def quantize_dynamically(file: Path) -> None:
    """Products with weights in int8, one scale per output channel; scales of activations are computed for each batch.
    No image is needed to calibrate them, and they fit the activations more closely than fixed ones."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with preprocessed(file) as prepared:
        model = onnx.load(str(prepared))
        del model.graph.value_info[:]  # shapes from the trace with the example batch, which the quantizer rejects
        onnx.save(model, str(prepared))
        quantize_dynamic(str(prepared), str(file), weight_type=QuantType.QInt8, **WEIGHTS_IN_INT8)


def quantize(file: Path, pixels: np.ndarray) -> None:
    """Products with weights in int8, one scale per output channel; scales of activations from `pixels`."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter(np.array_split(pixels, max(len(pixels) // 16, 1)))

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.batches, None)
            return None if batch is None else {INPUT: batch}

    with preprocessed(file) as prepared:
        quantize_static(
            str(prepared),
            str(file),
            Reader(),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            **WEIGHTS_IN_INT8,
        )


@contextlib.contextmanager
def preprocessed(file: Path) -> Iterator[Path]:
    """The model as ONNX Runtime's quantizer wants it, in a temporary file."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = file.with_name("prepared.onnx")
    with quiet():
        quant_pre_process(str(file), str(prepared), skip_symbolic_shape=True)
        yield prepared
    prepared.unlink()


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{(lines[0] if lines else type(error).__name__).rstrip('.')}."


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The exporter prints its progress and warns of its own internals."""
    levels = {name: logging.getLogger(name).level for name in ("torch.onnx", "onnxscript", "onnx_ir", "root")}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
