"""`finessl bench step`: time of a training step, of its parts, and compared with the rate of matrix products. Weights are
random, and so are pixels where no data is given: speed does not depend on them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from finessl.bench.profile import by_kind, kernels
from finessl.bench.timing import matmul_rate, peak_memory, reset_memory
from finessl.data.loader import Prefetcher
from finessl.errors import FinesslError
from finessl.models.build import store_frozen
from finessl.models.encoder import Encoder
from finessl.models.vit import ViTEncoder
from finessl.recipe import Recipe
from finessl.runs.inputs import open_source
from finessl.runtime.device import synchronize
from finessl.runtime.distributed import Processes
from finessl.runtime.precision import DTYPES, resolve_precision
from finessl.training.cuda_graph import EPILOGUE_STEP, compile_and_capture
from finessl.training.diagnostics import Diagnostics, hidden_truth
from finessl.training.experiment import Experiment, prepare
from finessl.training.step import TrainingStep
from finessl.training.timing import random_pixels

IMAGES = 2000
SLOWEST = 20  # kernels that a profile names
PARTS = ("data", "weak forward", "forward", "method", "diagnostics", "backward", "update")


@dataclass
class StepBench:
    parts: dict[str, float]  # milliseconds, with a synchronisation after each part
    step: float  # milliseconds per step in the pipelined loop
    images: int  # forward passes of images per step
    flops: float  # of the encoder's matrix products, forward and backward
    rate: float  # FLOP/s of a large matrix product on this device
    memory: int  # peak bytes
    compile_seconds: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def floor(self) -> float:
        """Milliseconds of the encoder's arithmetic at the rate of a large matrix product."""
        return 1000 * self.flops / self.rate

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.details,
            "step_ms": round(self.step, 3),
            "parts_ms": {name: round(value, 3) for name, value in self.parts.items()},
            "images_per_second": round(1000 * self.images / self.step, 1),
            "floor_ms": round(self.floor, 3),
            "share_of_floor": round(self.floor / self.step, 3),
            "peak_memory_gb": round(self.memory / 1e9, 3),
            "compile_seconds": round(self.compile_seconds, 1),
        }


def bench_step(
    recipe: Recipe,
    device: torch.device,
    *,
    classes: int = 100,
    source_size: int = 32,
    repeats: int = 10,
    compile: bool | None = None,
    profile: bool = False,
    two_sources: bool | None = None,
) -> StepBench:
    """Time the steps of a recipe, on the data that it names or else on random images of `source_size` in `classes`.

    two_sources: of a transformer's attention (models/vit.py); None: the faster one.
    """
    for name in ("cache_features", "prior"):
        if getattr(recipe.train, name):
            raise FinesslError(
                f"bench step times steps that encode their views, without a prior: leave out train.{name}."
            )
    dataset = open_source(recipe) if recipe.data.source else random_pixels(classes, IMAGES, source_size)
    experiment = prepare(recipe, None, device, dataset=dataset)
    precision = resolve_precision(recipe.train.precision, device)
    network = experiment.network.train()
    for part in network.encoder.parts():
        if isinstance(part, ViTEncoder):
            part.two_sources = two_sources
    store_frozen(network.encoder, precision)
    reset_memory(device)
    diagnostics = Diagnostics(experiment.method, hidden_truth(experiment.dataset, experiment.split), device)
    plain = TrainingStep(
        network, experiment.method, experiment.optimizer(), recipe.train, device, precision, Processes()
    )
    plain.observe = diagnostics.observe
    training = compile_and_capture(plain, compile=compile, steps=recipe.train.steps)
    prefetcher = Prefetcher(experiment.loader(Processes(), DTYPES[precision]), 10**6)

    warmup = 8 if device.type == "cuda" else 1  # eager steps come before the capture
    start, end = EPILOGUE_STEP + warmup, EPILOGUE_STEP + warmup + repeats
    first = run_steps(training, prefetcher, range(EPILOGUE_STEP, start), device)
    whole = 1000 * run_steps(training, prefetcher, range(start, end), device) / repeats
    kinds: dict[str, dict[str, float]] = {}
    slowest: dict[str, float] = {}
    if profile:
        views, loader = prefetcher.get(end), prefetcher.loader
        times = kernels(lambda: [training(end, views) for _ in range(4)], device, steps=4)
        kinds["step"], slowest = by_kind(times), dict(list(times.items())[:SLOWEST])
        kinds["views"] = by_kind(kernels(lambda: loader.load_all(range(4)), device, steps=4))
    parts = time_parts(experiment, plain, diagnostics, max(repeats // 2, 3))
    counts = prefetcher.loader.load(0)
    trained = sum(counts.counts)
    weak = 0 if counts.weak is None else len(counts.weak)
    rate = matmul_rate(device, DTYPES[precision])
    encoder = experiment.backbone.encoder
    return StepBench(
        parts,
        whole,
        trained + weak,
        encoder_flops(encoder) * weak
        + encoder_flops(encoder, trained=True) * trained * (1 + backward_passes(experiment)),
        rate,
        peak_memory(device),
        max(first - warmup * whole / 1000, 0.0),
        {
            "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
            "backbone": recipe.model.backbone,
            "tuning": recipe.tuning.name,
            "method": recipe.method.name,
            "image_size": experiment.image_size,
            "precision": precision,
            "images": trained + weak,
            "trained_parameters": network.count()[0],
            "matmul_tflops": round(rate / 1e12, 4),
            "kinds_ms": {
                part: {kind: round(value, 3) for kind, value in group.items()} for part, group in kinds.items()
            },
            "kernels_ms": {name: round(value, 3) for name, value in slowest.items()},
        },
    )


def run_steps(training: Any, prefetcher: Prefetcher, steps: range, device: torch.device) -> float:
    """Seconds of these steps in the pipelined loop."""
    synchronize(device)
    started = time.perf_counter()
    for step in steps:
        training(step, prefetcher.get(step))
        prefetcher.prepare(step + 1)
    synchronize(device)
    return time.perf_counter() - started


def time_parts(
    experiment: Experiment, training: TrainingStep, diagnostics: Diagnostics, repeats: int
) -> dict[str, float]:
    """Milliseconds of each part, with a synchronisation after it (so their sum exceeds a pipelined step)."""
    loader = experiment.loader(Processes(), DTYPES[training.precision])
    device, method = experiment.device, experiment.method
    totals = dict.fromkeys(PARTS, 0.0)

    def timed(name: str, function: Any) -> Any:
        synchronize(device)
        start = time.perf_counter()
        value = function()
        synchronize(device)
        totals[name] += 1000 * (time.perf_counter() - start)
        return value

    for step in range(100, 101 + repeats):
        if step == 101:  # the first may still compile
            totals = dict.fromkeys(PARTS, 0.0)
        views = timed("data", lambda step=step: loader.load(step))
        method.before_step(step)
        weak = timed("weak forward", lambda views=views: training.forward_weak(views))
        trained = timed("forward", lambda views=views: training.forward_trained(views))
        found = timed(
            "method", lambda views=views, weak=weak, trained=trained: training.heads_and_loss(views, weak, trained)
        )
        timed("diagnostics", lambda views=views, found=found: diagnostics.observe(found[0], views.index, found[1]))
        timed("backward", lambda found=found: training.backward(found[1]))
        timed("update", training.update)
    return {name: total / repeats for name, total in totals.items() if total}


def backward_passes(experiment: Experiment) -> int:
    """Arithmetic of the backward pass in forward passes: gradients of activations (1), and of trained weights (2)."""
    trained = sum(p.numel() for p in experiment.backbone.encoder.parameters() if p.requires_grad)
    return 0 if trained == 0 else 1 if trained < experiment.network.count()[1] / 2 else 2


def encoder_flops(encoder: Encoder, *, trained: bool = False) -> float:
    """FLOPs of a transformer's forward pass per image: matrix products only, with prompts as prefixes and a last block for the
    class token only.   trained: of a view with gradient, which may lose patches."""
    if not isinstance(encoder, ViTEncoder):
        return float("nan")
    model = encoder.model
    kept = model.patch_embed.num_patches
    if trained and encoder.patch_dropout is not None:
        kept = max(1, int(kept * (1 - encoder.patch_dropout.prob)))
    tokens = kept + model.num_prefix_tokens
    prompts = 0 if encoder.prompts is None else encoder.prompts.shape[1]
    carried = 0 if encoder.tokens is None else len(encoder.tokens)
    width = model.embed_dim
    patch = 3 * model.patch_embed.patch_size[0] * model.patch_embed.patch_size[1]
    macs = model.patch_embed.num_patches * patch * width
    for i, block in enumerate(model.blocks):
        rows = tokens + carried
        active = 1 if i == encoder.depth - 1 and model.global_pool == "token" else rows
        hidden = next(m for m in block.mlp.fc1.modules() if isinstance(m, nn.Linear)).out_features  # may be wrapped
        macs += 2 * rows * width * width + active * (2 * width * width + 2 * width * hidden)
        macs += 2 * active * (rows + prompts) * width
    return 2.0 * macs
