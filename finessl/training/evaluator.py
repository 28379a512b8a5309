"""The network's outputs for whole images, without augmentation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from finessl.data.pixel_store import PixelStore
from finessl.methods.base import HeadOutputs
from finessl.runtime.callbacks import Progress, no_progress
from finessl.training.cuda_graph import Forward
from finessl.training.ema import Ema
from finessl.training.experiment import Experiment


class Evaluator:
    """Runs a forward pass over a store, in batches of the size that the pass takes.

    Args:
        forward: the network, or its captured form.
        precision: of the encoder: fp32, bf16, fp16 or fp8.
        progress: called with a label, the images done and all of them.
        ema: the average that the run evaluates and exports.
    """

    def __init__(
        self,
        experiment: Experiment,
        forward: Forward,
        precision: str,
        progress: Progress = no_progress,
        ema: Ema | None = None,
    ) -> None:
        self.experiment, self.forward, self.precision, self.progress = experiment, forward, precision, progress
        self.ema = ema

    def test_logits(self) -> Tensor:
        """Logits [n, C] of the test images, by the averaged parameters where there is an average."""
        experiment = self.experiment
        assert experiment.test_store is not None
        with self.ema.applied() if self.ema else contextlib.nullcontext():
            return self.logits(experiment.test_store, experiment.test_index).cpu()

    def logits(self, store: PixelStore, indices: np.ndarray) -> Tensor:
        """Logits [n, C] of the main head."""
        return self._run(lambda outputs: outputs.logits, store, indices, "evaluating")

    def all_logits(self, store: PixelStore, indices: np.ndarray, label: str) -> list[Tensor]:
        """Logits [n, C] of the main head and, where there is one, of the auxiliary head."""
        both = self._run(
            lambda outputs: torch.cat([head for head in outputs if head is not None], 1), store, indices, label
        )
        return list(both.split(len(self.experiment.split.classes), 1))

    def _run(
        self, choose: Callable[[HeadOutputs], Tensor], store: PixelStore, indices: np.ndarray, label: str
    ) -> Tensor:
        return self.experiment.encode(
            lambda images: choose(self.forward(images)),
            store,
            indices=indices,
            precision=self.precision,
            rows=self.forward.batch_size,
            progress=partial(self.progress, label),
        )
