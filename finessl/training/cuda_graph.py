"""A GPU kept busy: the encoder through torch.compile, and the whole step recorded as one CUDA graph.

A step is some thousand kernels, which the host launches more slowly than an H200 computes them. They are the same at
every step, so they are recorded once and then launched as one. What differs from step to step (views, learning rate,
the method's schedule) is written into fixed places on the device before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from finessl.data.loader import Views
from finessl.errors import FinesslError
from finessl.methods.base import HeadOutputs, Result
from finessl.models.build import compile_encoder
from finessl.models.network import Network
from finessl.runtime.compile import compiled
from finessl.runtime.precision import autocast
from finessl.training.step import TrainingStep

ENOUGH = 32  # images at a time: with fewer the device is mostly idle


@contextlib.contextmanager
def recording(what: str) -> Iterator[None]:
    """Says what to do where it fails. (CUDA does not promise to be usable afterwards.)"""
    try:
        yield
    except RuntimeError as error:
        raise FinesslError(
            f"{what} cannot be recorded as a CUDA graph: {str(error).splitlines()[0]}. A method or tuning "
            "that waits for the device (.item(), a boolean mask) or too little memory may be why; the same command "
            "with --no-compile goes on without, from the last checkpoint."
        ) from error


class CudaGraphStep:
    """A TrainingStep as a CUDA graph. The first steps are computed in the plain way: they compile kernels and make the
    optimizer's memory. A change of shapes, or of what trains, starts over."""

    PLAIN = 3

    def __init__(self, plain: TrainingStep) -> None:
        self.plain = plain
        self.stream = torch.cuda.Stream(plain.device, priority=-1)  # before the next views, which can wait
        self.network = list(plain.network.parameters())
        self.start_over(None)

    def start_over(self, kind: Any) -> None:
        self.kind, self.seen = kind, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.views: Views | None = None
        self.result: Result | None = None

    def __call__(self, step: int, views: Views) -> Result:
        kind = ([tensor.shape for tensor in views.tensors()], [parameter.requires_grad for parameter in self.network])
        if kind != self.kind:
            self.start_over(kind)
        self.plain.schedule(step)
        if self.graph is None and self.seen >= self.PLAIN:
            self.record(views)
        if self.graph is None:
            self.seen += 1
            return self.compute(views)
        assert self.views is not None and self.result is not None
        for place, tensor in zip(self.views.tensors(), views.tensors(), strict=True):
            place.copy_(tensor, non_blocking=True)
        self.graph.replay()
        return self.result

    def compute(self, views: Views) -> Result:
        """On the stream that records later, where autograd then expects the gradients."""
        here = torch.cuda.current_stream(self.plain.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            result = self.plain.compute(views)
        here.wait_stream(self.stream)
        return result

    def record(self, views: Views) -> None:
        """Note down what `compute` launches; nothing is computed."""

        def own(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.clone()

        self.views = replace(
            views,
            trained=views.trained.clone(),
            weak=own(views.weak),
            labels=views.labels.clone(),
            index=own(views.index),
        )
        graph = torch.cuda.CUDAGraph()
        try:
            if not self.plain.network.trainable_buffers():  # BatchNorm statistics: the passes move them in turn
                self.plain.beside = torch.cuda.Stream(self.plain.device, priority=-1)
            with recording("the training step"), torch.cuda.graph(graph, stream=self.stream):
                self.result = self.plain.compute(self.views)
        finally:
            self.plain.beside = None
        self.graph = graph

    def forget(self) -> None:
        self.plain.forget()
        self.start_over(None)

    # ---- what a checkpoint keeps -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return self.plain.state()

    def load(self, state: dict[str, Any]) -> None:
        self.plain.load(state)
        self.start_over(None)


class CudaGraphForward:
    """A network's answer to images, without gradient; its encoder as a CUDA graph for the batch of the weak views, which
    it has been compiled for. Its parameters may change from call to call, their places may not."""

    def __init__(self, step: TrainingStep) -> None:
        self.network, self.device, self.precision = step.network, step.device, step.precision
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, images: Tensor) -> HeadOutputs:
        if self.graph is None:
            self.record(images)
        assert self.graph is not None
        self.images.copy_(images)
        self.graph.replay()
        return self.network.classify(self.features)

    def record(self, images: Tensor) -> None:
        self.images = images.clone()
        here, stream = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles and takes what memory it needs
                self.compute()
        here.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        torch.clear_autocast_cache()  # parameters are to be cast at every replay, not taken as they were before
        with recording("evaluation"), torch.cuda.graph(graph, stream=stream):
            self.features = self.compute()
        torch.clear_autocast_cache()
        self.graph = graph

    def compute(self) -> Tensor:
        with torch.no_grad(), autocast(self.device, self.precision):
            return self.network.features(self.images)


def answering(step: TrainingStep | CudaGraphStep, network: Network) -> tuple[Callable[[Tensor], HeadOutputs], int]:
    """What answers images in evaluation, and how many it must be given at a time (0: any number)."""
    if not isinstance(step, CudaGraphStep) or network.trainable_buffers():
        return network, 0
    plain = step.plain
    weak = plain.train.batch_size * plain.train.mu if plain.method.weak == "no_grad" else 0
    return (CudaGraphForward(plain), weak) if weak >= ENOUGH else (network, 0)


def compiles(compile: bool | None, device: torch.device, steps: int) -> bool:
    """`compile` None: on a GPU, for runs long enough to repay it."""
    return compile or (compile is None and device.type == "cuda" and steps >= 200)


def accelerate(step: TrainingStep, *, compile: bool | None, steps: int) -> TrainingStep | CudaGraphStep:
    """`step` as fast as it gets."""
    gpu = step.device.type == "cuda"
    if not compiles(compile, step.device, steps):
        return step
    compile_encoder(step.network.encoder)
    if step.processes.world > 1:
        return step
    step.heads_and_loss = compiled(step.heads_and_loss)  # type: ignore[method-assign]  # some hundred operations on few numbers
    # not recorded: a scaled loss (its scale is decided by the host) and parts that are recomputed (PyTorch asks for the
    # state of the random numbers, which it may not while recording)
    recordable = gpu and step.precision != "fp16" and not step.network.encoder.checkpointing
    return CudaGraphStep(step) if recordable else step
