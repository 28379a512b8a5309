"""One training step: views in, updated parameters out. Nothing here waits for the device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from finessl.data.loader import Views
from finessl.methods.base import Batch, HeadOutputs, Method, Outputs, Result
from finessl.models.network import Network
from finessl.models.vit import ViTEncoder
from finessl.recipe import TrainRecipe
from finessl.runtime.distributed import Processes
from finessl.runtime.precision import autocast
from finessl.training.batch_norm import synchronise_batch_norm
from finessl.training.ema import Ema
from finessl.training.known import KnownLabels
from finessl.training.prior import Prior

# Called with every step's weak logits, the numbers of the images, and the result.
Observer = Callable[[HeadOutputs | None, Tensor | None, Result], None]


def lr_factor(train: TrainRecipe, step: int, phase: tuple[int, int] | None = None) -> float:
    """The learning rate at `step`, as a fraction of the full rate. The schedule spans the steps [first, last) of `phase`."""
    first, last = phase or (0, train.steps)
    step -= first
    if step < train.warmup:
        return (step + 1) / train.warmup
    if train.schedule == "constant":
        return 1.0
    if train.schedule == "cosine":
        done = step / (last - first)
    elif train.schedule == "cosine-fixmatch":
        return math.cos(7 * math.pi / 16 * step / (last - first))
    else:  # cosine-epoch: constant within an epoch
        done = (step // train.epoch_steps) / math.ceil((last - first) / train.epoch_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


def patch_dropout(train: TrainRecipe, step: int) -> float:
    """The share of the patches that trained views lose at `step`."""
    return train.patch_dropout if step < train.patch_dropout_until * train.steps else 0.0


class TrainingStep:
    """forward, loss, backward, update."""

    def __init__(
        self,
        network: Network,
        method: Method,
        optimizer: torch.optim.Optimizer,
        train: TrainRecipe,
        device: torch.device,
        precision: str,
        processes: Processes,
    ) -> None:
        if processes.world_size > 1:
            synchronise_batch_norm(network.encoder, processes.world_size)
        self.network, self.method, self.optimizer, self.train = network, method, optimizer, train
        self.device, self.precision, self.processes = device, precision, processes
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        dropouts = [part.patch_dropout for part in network.encoder.parts() if isinstance(part, ViTEncoder)]
        self.patch_dropouts = [module for module in dropouts if module is not None]
        self.side_stream: torch.cuda.Stream | None = None  # for what can run at the same time: weak views, `observe`
        self.observe: Observer | None = None
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        self.prior: Prior | None = None  # on the pseudo-labels
        self.known: KnownLabels | None = None  # in place of them
        self.ema = Ema(self.parameters, train.ema) if train.ema else None

    def __call__(self, step: int, views: Views) -> Result:
        self.schedule(step)
        return self.compute(views)

    def schedule(self, step: int) -> None:
        """Set from the host what depends on the step number."""
        factor = lr_factor(self.train, step, self.method.phase(step))
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["initial_lr"] * factor)
            else:
                group["lr"] = group["initial_lr"] * factor
        for module in self.patch_dropouts:
            module.prob = patch_dropout(self.train, step)
        self.method.before_step(step)
        if self.prior is not None:
            self.prior.before_step(step)
        if self.ema is not None:
            self.ema.before_step(step)

    def compute(self, views: Views) -> Result:
        """What the device does. The operations are the same at every step, so that a CUDA graph can replay them."""
        with self.aside():
            weak = self.forward_weak(views)
        trained = self.forward_trained(views)
        self.join()
        weak_outputs, result = self.heads_and_loss(views, weak, trained)
        if self.observe is not None:
            with self.aside():
                self.observe(weak_outputs, views.index, result)
        self.backward(result)
        self.update()
        self.join()
        return replace(result, loss=result.loss.detach())

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Launch on the side stream, where there is one. The tensors that it reads must live until `join`."""
        if self.side_stream is None:
            yield
            return
        self.side_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side_stream):
            yield

    def join(self) -> None:
        if self.side_stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.side_stream)

    def clear_optimizer(self) -> None:
        """Clear optimizer state after the network was re-initialised."""
        self.optimizer.state.clear()
        if self.ema is not None:
            self.ema.restart()

    def forward_weak(self, views: Views) -> Tensor | None:
        """Features of the weak views, where the method does not learn from them."""
        if views.weak is None:
            return None
        with torch.no_grad(), autocast(self.device, self.precision):
            return self.network.features(views.weak)

    def forward_trained(self, views: Views) -> Tensor:
        """Features of all views with gradient, in one pass."""
        with autocast(self.device, self.precision):
            return self.network.features(views.trained)

    def heads_and_loss(
        self, views: Views, weak_features: Tensor | None, trained_features: Tensor
    ) -> tuple[HeadOutputs | None, Result]:
        """The heads' logits of the weak views, without their gradient, and the method's loss on the global batch."""
        weak: HeadOutputs | None = None
        if weak_features is not None:
            with torch.no_grad():
                weak = self.network.classify(weak_features)
        labeled, *others = split_rows(self.network.classify(trained_features), views.counts)
        if self.method.weak == "grad" and others:
            weak, *others = others
        strong = others[0] if others else None
        outputs = Outputs(
            self.gather(labeled),
            None if weak is None else self.gather(weak),
            None if strong is None else self.gather(strong, views.strong_views),
        )
        if self.prior is not None and outputs.weak is not None and views.index is not None:
            outputs.weak = self.prior.apply(outputs.weak, views.index)
        if self.known is not None and outputs.weak is not None and views.index is not None:
            outputs.weak = self.known.apply(outputs.weak, views.index)
        result = self.method(outputs, Batch(views.labels, views.index))
        return None if outputs.weak is None else outputs.weak.detach(), result

    def backward(self, result: Result) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(result.loss).backward()
        self.processes.reduce_gradients(self.parameters)

    def update(self) -> None:
        if self.train.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters, self.train.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update()

    def gather(self, view: HeadOutputs, groups: int = 1) -> HeadOutputs:
        if self.processes.world_size == 1:
            return view
        gather = self.processes.gather
        return HeadOutputs(gather(view.logits, groups), None if view.aux is None else gather(view.aux, groups))

    # ---- checkpoint -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict()["state"],
            "method": self.method.state_dict(),
            "scaler": self.scaler.state_dict(),
            **({} if self.ema is None else {"ema": self.ema.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        now = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": now["param_groups"]})
        self.method.load_state_dict(state["method"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])


def split_rows(view: HeadOutputs, counts: list[int]) -> list[HeadOutputs]:
    auxiliary: Any = [None] * len(counts) if view.aux is None else view.aux.split(counts)
    return [HeadOutputs(logits, aux) for logits, aux in zip(view.logits.split(counts), auxiliary, strict=True)]


def all_finite(tensors: list[Tensor]) -> bool:
    return bool(torch.stack([t.detach().isfinite().all() for t in tensors]).all())
