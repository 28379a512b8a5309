"""`finessl bench predict`: images per second of a trained classifier. The encoder is compared with the rate of matrix
products, a folder of JPEGs with the slower of encoder and decoding."""

from __future__ import annotations

import math
import tempfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from finessl.bench.data import Rate
from finessl.bench.scale import write_originals, write_set
from finessl.bench.step import IMAGES, encoder_flops
from finessl.bench.timing import matmul_rate, milliseconds
from finessl.data.reading import reader
from finessl.data.sources import open_dataset
from finessl.inference.classifier import Classifier
from finessl.inference.evaluate import predict_images
from finessl.models.build import compile_encoder
from finessl.models.encoder import Encoder
from finessl.recipe import Recipe
from finessl.runtime.machine import usable_cores
from finessl.runtime.precision import DTYPES, autocast
from finessl.training.experiment import prepare
from finessl.training.timing import random_pixels


def bench_predict(
    recipe: Recipe, device: torch.device, *, batch: int, images: int, repeats: int, compile: bool | None = None
) -> list[Rate]:
    """batch: images per batch.   images: JPEGs in the folder (0: no folder).   compile: None: on a GPU."""
    experiment = prepare(recipe, None, device, dataset=random_pixels(100, IMAGES, 32))
    network = experiment.network.eval()
    description = {
        "classes": experiment.split.classes,
        "backbone": recipe.model.backbone,
        "image_size": experiment.image_size,
        "mean": list(experiment.mean),
        "std": list(experiment.std),
    }
    classifier = Classifier(network, description, device, recipe.train.precision)
    dtype = DTYPES[classifier.precision]  # fp8 is compared with bf16's rate
    products = str(dtype).removeprefix("torch.")
    limit = matmul_rate(device, dtype) / encoder_flops(experiment.backbone.encoder)  # images/s
    rows = []

    def encoder(part: str) -> None:
        rate = encoder_rate(network.encoder, classifier.precision, experiment.image_size, batch, device, repeats)
        known = math.isfinite(limit)  # products are counted for transformers only
        rows.append(Rate(part, rate, f"{products} matrix products alone", limit) if known else Rate(part, rate))

    encoder("encoder")
    if images:
        rows += folder_rates(classifier, images, repeats, rows[0].rate)
    if compile or (compile is None and device.type == "cuda"):
        compile_encoder(network.encoder)
        encoder("encoder, compiled")
    return rows


@torch.no_grad()
def encoder_rate(encoder: Encoder, precision: str, size: int, batch: int, device: torch.device, repeats: int) -> float:
    """Images/s; several batches are launched before a synchronisation, as in evaluation."""
    pixels = torch.randn(batch, 3, size, size, device=device, dtype=DTYPES[precision])
    at_once = 8 if device.type == "cuda" else 1

    def work() -> None:
        with autocast(device, precision):
            for _ in range(at_once):
                encoder(pixels)

    return 1000 * batch * at_once / milliseconds(work, device, repeats=repeats)


def folder_rates(classifier: Classifier, images: int, repeats: int, encoding: float) -> list[Rate]:
    """Rates for a folder of 500×375 JPEGs: decoding only, and from file to prediction, compared with the slower of decoding and
    `encoding` (images/s of the encoder)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_set(folder / "images", write_originals(folder / "originals", 64), images)
        files = open_dataset(folder / "images").train
        read = reader(files, classifier.image_size)

        def decode() -> None:
            with ThreadPoolExecutor(usable_cores()) as pool:
                deque(pool.map(read, range(len(files))), maxlen=0)

        def predict() -> None:
            deque(predict_images(classifier, files), maxlen=0)

        decoding, predicting = (
            milliseconds(work, classifier.device, repeats=repeats, warmup=1) / 1000 for work in (decode, predict)
        )
    decoded = len(files) / decoding
    limit = ("the limit: decoding", decoded) if decoded < encoding else ("the limit: the encoder", encoding)
    return [
        Rate("decoding alone", decoded, "the encoder", encoding),
        Rate("folder of JPEGs", len(files) / predicting, *limit),
    ]
