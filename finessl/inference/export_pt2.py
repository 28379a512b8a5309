"""pt2: the whole classifier as one torch.export program, model.pt2, with predict.py next to it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finessl.inference.agreement import Logits
from finessl.inference.classifier import Classifier
from finessl.inference.export import Options, copy_script, describe
from finessl.inference.export_onnx import quiet
from finessl.inference.graph import OUTPUTS, ClassifierGraph, trace


def write(classifier: Classifier, folder: Path, options: Options) -> tuple[Logits, dict[str, Any]]:
    file, stored = folder / "model.pt2", io.BytesIO()
    with quiet():
        program = trace(ClassifierGraph(classifier), classifier.image_size)
        torch.export.save(program, stored, extra_files={"finessl.json": json.dumps(describe(classifier))})
        file.write_bytes(stored.getbuffer())  # torch's own writer aborts the process where the disk is full
        model = torch.export.load(file).module()
    copy_script("predict_pt2.py", folder)

    @torch.no_grad()
    def logits(pixels: np.ndarray) -> np.ndarray:
        return model(torch.from_numpy(pixels))[1].numpy()

    return logits, {"outputs": list(OUTPUTS)}
