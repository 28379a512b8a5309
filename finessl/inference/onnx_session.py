"""ONNX Runtime: sessions, and an exported classifier that answers as `finessl.load(RUN)` does."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finessl.errors import FinesslError
from finessl.inference.classifier import ImageLike, as_list, batches
from finessl.inference.graph import INPUT
from finessl.registry import nearest
from finessl.runtime.precision import supports_bf16

BATCH = 32
OPENVINO = "OpenVINOExecutionProvider"


def require(extra: str) -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise FinesslError(f"ONNX needs {error.name}: pip install 'finessl[{extra}]'.") from error


def available_providers() -> list[str]:
    """The execution providers of the installed ONNX Runtime."""
    try:
        import onnxruntime
    except ImportError as error:
        raise FinesslError("ONNX Runtime is missing: pip install 'finessl[export]'.") from error
    return onnxruntime.get_available_providers()


def open_session(file: Path, provider: str | None = None, threads: int | None = None) -> Any:
    """A session on the CPU, or on the named execution provider ("CUDA" for CUDAExecutionProvider). `threads`: by default
    those of OMP_NUM_THREADS, else all cores."""
    known = available_providers()
    import onnxruntime

    name = "CPU" if provider is None else provider
    name = name if name.endswith("ExecutionProvider") else f"{name}ExecutionProvider"
    if name not in known:
        raise FinesslError(
            f"this onnxruntime has no {name}{nearest(name, known) or ';'} it has {', '.join(known)}. For CUDA install "
            "onnxruntime-gpu, for OpenVINO onnxruntime-openvino, in place of onnxruntime."
        )
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    threads = threads or (int(wanted) if wanted.isdecimal() else 0)
    settings.intra_op_num_threads = threads
    options = [openvino_options(threads)] if name == OPENVINO else None
    try:
        return onnxruntime.InferenceSession(str(file), settings, providers=[name], provider_options=options)
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise FinesslError(f"{file} cannot be opened by onnxruntime {onnxruntime.__version__}: {error}") from error


def openvino_options(threads: int = 0) -> dict[str, str]:
    """Options of the OpenVINO provider: in bf16 where the CPU multiplies it, as finessl's own prediction is. ONNX
    Runtime's own CPU provider has no matrix product in bf16. threads: 0 for all cores."""
    import torch

    precision = "bf16" if supports_bf16(torch.device("cpu")) else "f32"
    plugin = {"INFERENCE_PRECISION_HINT": precision} | ({"INFERENCE_NUM_THREADS": str(threads)} if threads else {})
    return {"device_type": "CPU", "load_config": json.dumps({"CPU": plugin})}


class OnnxClassifier:
    """The classifier in an onnx export: `classes`, `image_size`, `predict_proba`, `embed`.

    folder: of the export.   provider, threads: as in `open_session`.   images: as `Classifier` takes them.
    """

    def __init__(self, folder: str | Path, provider: str | None = None, threads: int | None = None) -> None:
        file = Path(folder) / "model.onnx"
        if not file.is_file():
            raise FinesslError(f"{folder} holds no model.onnx; make it with finessl export RUN --format onnx.")
        self.session = open_session(file, provider, threads)
        try:
            about = json.loads(self.session.get_modelmeta().custom_metadata_map["finessl"])
            self.classes: list[str] = about["classes"]
            self.image_size: int = about["image_size"]
        except (KeyError, ValueError, TypeError) as error:
            raise FinesslError(f"{file} was not written by finessl export: it has no such metadata.") from error

    def predict_proba(self, images: ImageLike | Sequence[ImageLike]) -> np.ndarray:
        """Probabilities [n, classes], in the order of `.classes`."""
        return self._run(images, "probabilities")

    def embed(self, images: ImageLike | Sequence[ImageLike]) -> np.ndarray:
        return self._run(images, "embedding")

    def _run(self, images: ImageLike | Sequence[ImageLike], output: str) -> np.ndarray:
        found = [
            self.session.run([output], {INPUT: pixels})[0]
            for pixels in batches(as_list(images), self.image_size, BATCH)
        ]
        return np.concatenate(found) if found else np.empty((0, len(self.classes)), np.float32)
