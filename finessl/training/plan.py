"""A plan that fits the machine: `finessl train DATA [--budget 15m]` on the user's own images.

Backbone, tuning, image size, batch and steps are chosen so that the run ends within the budget. The backbone is the
one that `quick` takes: its frozen features are solved first, and that answer is what training has to beat. Then a few
steps of each way to train are timed, and the first way in order of preference (WAYS) that has room for enough steps is
taken. Where none has, the answer from frozen features is the result.

The choice is written into the run's recipe: the run can be repeated anywhere from that file.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from finessl.errors import FinesslError
from finessl.frozen.choose import SOLVERS
from finessl.models.aliases import alias_of
from finessl.models.backbones import create_backbone
from finessl.models.vit import ViTEncoder
from finessl.recipe import Recipe
from finessl.recipe.small_batch import FULL_BATCH, small_batch
from finessl.runs.inputs import make_or_load_split, open_source
from finessl.runtime.device import describe_device, resolve_device
from finessl.runtime.machine import usable_cores
from finessl.runtime.progress import Display, duration
from finessl.training.affordable import RESERVE, affordable
from finessl.training.diagnostics import MAX_ENCODED, MAX_PREDICTED, MAX_SHARE, MIN_IMAGES
from finessl.training.quick import Answer, check_labels, quick
from finessl.training.timing import Clock, Cost, time_reading, time_training

BUDGET = {"cuda": 600.0}  # seconds; CPU_BUDGET elsewhere
CPU_BUDGET = 900.0
COMPILING = 60.0  # seconds that a GPU's first steps take
LONGEST = 5000  # steps; a choice, not a measurement
# Labeled images, counted as often as they are used, below which training is not worth its time: 1,000 steps of 32 are level
# with frozen features on TrashNet and far ahead on CIFAR-100, 600 steps of 8 are behind (docs/results.md).
FEWEST = {"tuned": 32_000, "cached": 16_000}
DRAWS = 2  # views of each kind whose features are kept
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
SHORT_RUN = {"head.init": "class-mean", "method.pace_reset": "never"}  # a short run cannot begin with random heads
WARMUP = 20  # a run with a prior warms up for 1/20 of its steps


def read_budget(given: str | float | None) -> float | None:
    """Seconds.   given: "90", "90s", "15m", "2h" or a number; None stays open."""
    if given is None:
        return None
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*(s|m|h|min)?\s*", str(given))
    seconds = float(found[1]) * UNITS[(found[2] or "s")[0]] if found else 0.0
    if not seconds > 0:
        raise FinesslError(f"--budget {given!r} should be a time such as 90s, 15m or 2h.")
    return seconds


@dataclass(frozen=True)
class Sizes:
    """What a run has to go through."""

    train: int  # images
    test: int
    start: float  # seconds before the first step: reading the images, compiling


@dataclass(frozen=True)
class Way:
    """One way to train, and what it costs here."""

    title: str
    kind: str  # "tuned" or "cached"
    fields: Mapping[str, Any]  # of its recipe, by dotted name
    recipe: Recipe
    cost: Cost
    sizes: Sizes

    def seconds(self, steps: int) -> float:
        """Of a run of this many steps: reading the images, training, evaluating, labeling the unlabeled images."""
        train, sizes, cost = self.recipe.train, self.sizes, self.cost
        passes = train.batch_size * (1 + train.mu * (1 + self.recipe.data.strong_views))
        rounds = min(max(steps * passes // (2 * max(sizes.test, 1)), 1), 10)
        share = int(MAX_SHARE * steps * passes)
        labeled = min(sizes.train, MAX_PREDICTED, max(MIN_IMAGES, share // 2))
        encoded = min(sizes.train, MAX_ENCODED, max(MIN_IMAGES, share // 4))
        images = rounds * sizes.test + labeled + encoded
        views = 2 * train.cache_features * sizes.train
        return sizes.start + steps * cost.step + images * cost.image + views * cost.view

    def steps_within(self, seconds: float) -> int:
        """The most steps that fit, LONGEST at most; 0 where not even one does."""
        fits, beyond = 0, LONGEST + 1
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            fits, beyond = (middle, beyond) if self.seconds(middle) <= seconds else (fits, middle)
        return fits // 10 * 10 if fits > 20 else fits

    @property
    def needs(self) -> int:
        """Steps."""
        return math.ceil(FEWEST[self.kind] / self.recipe.train.batch_size)


@dataclass(frozen=True)
class Plan:
    """What will be done, and why."""

    recipe: Recipe
    budget: float  # seconds
    seconds: float  # that training will take
    lines: list[str]
    answer: Answer | None  # what frozen features give; None where encoding the images does not fit
    frozen: bool = False  # that answer is the result: nothing is trained


def make_plan(
    given: Mapping[str, Any],
    budget: float | None = None,
    *,
    files: Mapping[str, str] | None = None,
    device: str = "auto",
    display: Display | None = None,
    clock: Clock = time.perf_counter,
) -> Plan:
    """given: recipe fields by dotted name, which are taken as they are.   budget: seconds; None: the default.   files: weights
    of backbones, by name.   clock: for tests."""
    begun, display, target = clock(), display or Display(quiet=True), resolve_device(device)
    budget = budget or BUDGET.get(target.type, CPU_BUDGET)
    recipe = Recipe.read(None, given, source=True)
    dataset = open_source(recipe, display.update)
    check_labels(dataset)
    fits = affordable(recipe, dataset, files or {}, budget, target, clock)
    recipe = recipe.with_fields({"data.image_size": fits.image_size})
    answer = quick(recipe, None, fits.backbones, device=device, display=display) if fits.backbones else None
    chosen: dict[str, Any] = {"model.backbone": "embedded", "data.image_size": fits.image_size}
    if answer is not None:
        chosen["model.backbone"] = answer.chosen.name
        chosen |= {"model.weights": answer.chosen.weights} if answer.chosen.weights else {}
    classes = len(make_or_load_split(recipe, dataset, None, False).classes)
    test = 0 if dataset.test is None else len(dataset.test)
    reading = time_reading(dataset.train, clock) * (len(dataset.train) + test)
    sizes = Sizes(len(dataset.train), test, reading + (COMPILING if target.type == "cuda" else 0.0))
    ways = time_ways(given, chosen, classes, sizes, target, clock, display)
    left = (1 - RESERVE) * budget - (clock() - begun)
    return decide(ways, answer, recipe, budget, left, trains=trains(given), device=target, notes=fits.notes)


def trains(given: Mapping[str, Any]) -> bool:
    """Does the command ask for training in particular, so that frozen features alone are no answer to it?"""
    return any(name.startswith(("method.", "tuning.", "head.", "train.")) for name in given)


# ---- ways to train --------------------------------------------------------------------------------------------------


def time_ways(
    given: Mapping[str, Any],
    chosen: Mapping[str, Any],
    classes: int,
    sizes: Sizes,
    device: torch.device,
    clock: Clock,
    display: Display,
) -> list[Way]:
    """Every way that the given fields leave open, timed, in order of preference."""
    ways: list[Way] = []
    mistake: FinesslError | None = None
    wanted = wishes(depth_of(chosen), device)
    for number, (title, kind, fields) in enumerate(wanted):
        display.update("timing training steps", number, len(wanted))
        fields = {**SHORT_RUN, **chosen, **fields, **given}
        if fields.get("method.name", "finessl") != "finessl":
            fields.pop("method.pace_reset")
        try:
            recipe = Recipe.read(None, fields)
            if all(recipe != way.recipe for way in ways):
                cost = time_training(recipe, classes, device, clock)
                ways.append(
                    Way(title if "tuning.name" not in given else recipe.tuning.name, kind, fields, recipe, cost, sizes)
                )
        except FinesslError as error:  # what is given does not go together with this way
            mistake = mistake or error
    if not ways and mistake is not None:
        raise mistake
    return ways


def wishes(depth: int, device: torch.device) -> list[tuple[str, str, dict[str, Any]]]:
    """(title, kind, fields) in order of preference. depth: blocks of a transformer, 0 for another backbone."""
    batch = {"train.batch_size": FULL_BATCH if device.type == "cuda" else 8}
    if not depth:
        kept = {"tuning.name": "linear", "train.cache_features": DRAWS, "train.batch_size": 32}
        return [("a linear head on kept features", "cached", kept)]
    tuned, part = {"tuning.name": "adaptformer", **batch}, max(depth // 3, 1)
    found = [("AdaptFormer in all blocks", "tuned", tuned)]
    if device.type != "cuda":
        found.append((f"AdaptFormer in the last {part} blocks", "tuned", {**tuned, "tuning.layers": part}))
    return found


def depth_of(chosen: Mapping[str, Any]) -> int:
    parts = create_backbone(chosen["model.backbone"], pretrained=False).encoder.parts()
    return min(part.depth if isinstance(part, ViTEncoder) else 0 for part in parts)


# ---- the choice -----------------------------------------------------------------------------------------------------


def decide(
    ways: Sequence[Way],
    answer: Answer | None,
    recipe: Recipe,
    budget: float,
    left: float,
    *,
    trains: bool,
    device: torch.device,
    notes: Sequence[str] = (),
) -> Plan:
    """The first way with room for enough steps; frozen features where there is none. left: seconds for training."""
    rooms = [way.steps_within(left) for way in ways]
    number = next((k for k, way in enumerate(ways) if rooms[k] >= way.needs), None)
    lines = [f"Plan for {duration(budget)} on {machine(device)} (--budget):"]
    lines += [] if answer is None else [describe(answer)]
    cheapest = min(range(len(ways)), key=lambda k: ways[k].seconds(ways[k].needs))
    spent = (1 - RESERVE) * budget - left

    def wanted(way: Way, steps: int) -> str:
        return as_option((way.seconds(steps) + spent) / (1 - RESERVE))

    if number is None and answer is not None and not trains:
        way = ways[cheapest]
        lines += [
            "  This is what finessl recommends for this time: there is no room for the steps that training needs.",
            f"  Training ({way.title}) has room from --budget {wanted(way, way.needs)} on, or on a GPU.",
        ]
        return Plan(recipe, budget, 0.0, [*lines, *notes], answer, frozen=True)
    number = cheapest if number is None else number
    way, steps = ways[number], max(rooms[number], 1)
    epoch = min(500, math.ceil(steps / 10))
    lengths = {
        "train.epoch_steps": epoch,
        **with_prior(way, answer, steps),
        **small_batch(way.recipe.train.batch_size, steps),
    }
    planned = Recipe.read(None, {**lengths, **way.fields, "train.steps": steps})
    train, seconds = planned.train, way.seconds(steps)
    size = planned.data.image_size or alias_of(planned.model.backbone).image_size
    lines.append(
        f"  Training: {planned.model.backbone}{f' at {size} px' if size else ''}, {way.title}, {steps:,} steps of "
        f"{train.batch_size} labeled and {train.batch_size * train.mu} unlabeled images, "
        f"{1000 * way.cost.step:,.0f} ms each: about {duration(seconds)} from here."
    )
    if train.prior:
        lines.append("  Labels propagated over the frozen features are a prior on its pseudo-labels.")
    if seconds > left:
        lines.append(f"  This is more than the budget: without any step it takes {duration(way.seconds(0))}.")
    if steps < LONGEST:
        full = f"--budget {wanted(way, LONGEST)}"
        lines.append(f"  It gives up {LONGEST - steps:,} of {LONGEST:,} steps; with {full} it has them all.")
    if number:
        lines.append(
            f"  It also gives up {ways[0].title}, which has room from --budget {wanted(ways[0], ways[0].needs)} on."
        )
    if device.type == "cpu":
        lines.append("  A GPU has room for AdaptFormer in all blocks and batches of 32.")
    return Plan(planned, budget, seconds, [*lines, *notes], answer)


def with_prior(way: Way, answer: Answer | None, steps: int) -> dict[str, Any]:
    """Fields of a run whose pseudo-labels begin with those of the frozen features (prior.py): more accurate with few labels
    (docs/results.md). Every pseudo-label then counts from the first step on, and without a warm-up some runs diverge.
    Nothing where the features are not encoded, or the images too few for label propagation."""
    solvers = {candidate.solver for candidate in answer.chosen.choice.candidates} if answer is not None else set()
    if way.kind != "tuned" or way.recipe.method.name != "finessl" or "propagation" not in solvers:
        return {}
    return {"train.prior": 1.0, "train.warmup": math.ceil(steps / WARMUP)}


# ---- in words -------------------------------------------------------------------------------------------------------


def describe(answer: Answer) -> str:
    candidate = answer.candidate
    solver = SOLVERS.get(candidate.solver, candidate.solver)
    text = f"  Frozen features: {answer.chosen.name} at {answer.chosen.backbone.image_size} px, {solver}"
    if candidate.held_out is None or candidate.interval is None:
        return f"{text}; no label can be held out."
    low, high = candidate.interval
    return f"{text}, {100 * candidate.held_out:.0f} % of held-out labels ({100 * low:.0f}–{100 * high:.0f} %)."


def machine(device: torch.device) -> str:
    if device.type != "cpu":
        return describe_device(device)
    cores = usable_cores()
    return f"{cores} CPU core{'s' if cores > 1 else ''}"


def as_option(seconds: float) -> str:
    """As --budget takes it, rounded up."""
    return f"{math.ceil(seconds / 60)}m" if seconds < 90 * 60 else f"{math.ceil(seconds / 360) / 10:g}h"
