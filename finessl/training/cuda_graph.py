"""Training steps and forward passes as CUDA graphs.

A step launches about a thousand kernels, and the host launches them more slowly than an H200 runs them. A CUDA graph is
a recording of these launches: the step is captured once, and each later step is one launch (`graph.replay()`).

What a capture demands, and where this file provides it:

* The kernels of every step are the same. What depends on the step number (learning rate, ramps of the method) is
  written into tensors on the device before the replay: `TrainingStep.schedule`. A Python number would be frozen into
  the graph.
* Inputs have fixed addresses. `CudaGraphStep` keeps static copies of the views and copies each batch into them.
* Nothing waits for the device during a capture: no `.item()`, no boolean mask, no allocation that the caching
  allocator's private pool cannot serve. The first steps run eagerly, on the stream that captures later: they compile
  kernels and create the optimizer's state.
* Casts by autocast are captured too. `CudaGraphForward` clears the autocast cache, because a cached bf16 copy of a
  parameter would be read by every replay, however the parameter has changed.

A change of shapes, of the patches that are left out, or of the parameters that train (lp-ft), starts a new capture. Reference:
https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from finessl.data.loader import Views
from finessl.errors import FinesslError
from finessl.methods.base import HeadOutputs, Result
from finessl.models.build import (
    can_use_epilogues,
    compile_encoder,
    fuse_encoder,
    import_epilogues,
    use_epilogues,
    uses_epilogues,
)
from finessl.models.network import Network
from finessl.runtime.compile import compiled, uncompiled
from finessl.runtime.precision import autocast
from finessl.training.step import TrainingStep, patch_dropout

MIN_CAPTURED_BATCH = 32  # images; with fewer the device is mostly idle during evaluation
MIN_COMPILED_STEPS = 200  # steps of a run that repays the time of compiling
MIN_EPILOGUE_STEPS = 5000  # steps of a run that repays importing product_epilogues.py
EPILOGUE_STEP = 1000  # from which on it uses them. A fixed step: a resumed run trains every step by the same kernels


class Forward(Protocol):
    """A forward pass without gradient. `batch_size`: the number of images per call, 0 where any number will do."""

    batch_size: int

    def __call__(self, images: Tensor) -> HeadOutputs: ...


@contextlib.contextmanager
def capturing(what: str) -> Iterator[None]:
    """Turn a failed capture into an error that says what to do. (CUDA does not promise to be usable afterwards.)"""
    try:
        yield
    except RuntimeError as error:
        raise FinesslError(
            f"{what} cannot be captured as a CUDA graph: {str(error).splitlines()[0]}. A method or tuning "
            "that waits for the device (.item(), a boolean mask) or too little memory may be why; the same command "
            "with --no-compile goes on without, from the last checkpoint."
        ) from error


class CudaGraphStep:
    """A TrainingStep that is captured after `EAGER_STEPS` eager steps and replayed from then on.

    epilogues: from EPILOGUE_STEP on by product_epilogues.py, which a thread imports meanwhile."""

    EAGER_STEPS = 3

    def __init__(self, eager: TrainingStep, *, epilogues: bool = False) -> None:
        self.eager = eager
        self.importing = threading.Thread(target=import_epilogues, daemon=True) if epilogues else None
        self.stream = torch.cuda.Stream(eager.device, priority=-1)  # before the next views, which can wait
        self.parameters = list(eager.network.parameters())
        self.reset(None)

    def reset(self, signature: Any) -> None:
        """Forget the capture. `signature`: what it is valid for."""
        self.signature, self.eager_steps = signature, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.views: Views | None = None  # static inputs
        self.result: Result | None = None  # static outputs

    def __call__(self, step: int, views: Views) -> Result:
        if self.importing is not None:
            self.prepare_epilogues(self.importing, step)
        shapes, trains = [tensor.shape for tensor in views.tensors()], [p.requires_grad for p in self.parameters]
        signature = (shapes, trains, patch_dropout(self.eager.train, step))
        if signature != self.signature:
            self.reset(signature)
        self.eager.schedule(step)
        if self.graph is None and self.eager_steps >= self.EAGER_STEPS:
            self.capture(views)
        if self.graph is None:
            self.eager_steps += 1
            return self.compute(views)
        assert self.views is not None and self.result is not None
        for static, tensor in zip(self.views.tensors(), views.tensors(), strict=True):
            static.copy_(tensor, non_blocking=True)
        self.graph.replay()
        return self.result

    def prepare_epilogues(self, importing: threading.Thread, step: int) -> None:
        """Import them once the first capture is done, so that the first steps are not delayed."""
        due = step >= EPILOGUE_STEP
        if importing.ident is None and (due or self.graph is not None):
            importing.start()
        if due:
            importing.join()
            self.importing = None
            try:
                use_epilogues(self.eager.network.encoder)
            except Exception as error:  # of another package's import
                warnings.warn(f"training goes on without finessl[hopper]: {error!r}", stacklevel=2)
                return
            self.reset(None)

    def compute(self, views: Views) -> Result:
        """An eager step, on the stream that captures later: autograd accumulates gradients on the stream of their first
        use."""
        current = torch.cuda.current_stream(self.eager.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = self.eager.compute(views)
        current.wait_stream(self.stream)
        return result

    def capture(self, views: Views) -> None:
        """Record what `compute` launches; nothing is computed."""
        self.views = views.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            if not self.eager.network.trainable_buffers():  # BatchNorm statistics: the passes update them in turn
                self.eager.side_stream = torch.cuda.Stream(self.eager.device, priority=-1)
            with capturing("the training step"), torch.cuda.graph(graph, stream=self.stream):
                self.result = self.eager.compute(self.views)
        finally:
            self.eager.side_stream = None
        self.graph = graph

    def clear_optimizer(self) -> None:
        self.eager.clear_optimizer()
        self.reset(None)

    # ---- checkpoint -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.eager.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.eager.load_state_dict(state)
        self.reset(None)


class EagerForward:
    """The network as it is."""

    batch_size = 0

    def __init__(self, network: Network) -> None:
        self.network = network

    def __call__(self, images: Tensor) -> HeadOutputs:
        return self.network(images)


class CudaGraphForward:
    """A forward pass whose encoder is a CUDA graph, for the batch of the weak views, which it has been compiled for. With
    dropout the weak views' graph is not the evaluation's: then it is captured uncompiled, because compiling it again would
    cost more than it saves in ten evaluations. Parameters may change from call to call, their addresses may not."""

    def __init__(self, step: TrainingStep) -> None:
        self.network, self.device, self.precision = step.network, step.device, step.precision
        self.batch_size = step.train.batch_size * step.train.mu
        self.shares_compiled = not step.network.dropouts()
        self.epilogues = False  # those of the captured encoder
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, images: Tensor) -> HeadOutputs:
        if self.graph is None or self.epilogues != uses_epilogues(self.network.encoder):
            self.capture(images)
        assert self.graph is not None
        self.images.copy_(images)
        self.graph.replay()
        return self.network.classify(self.features)

    def capture(self, images: Tensor) -> None:
        self.graph, self.epilogues = None, uses_epilogues(self.network.encoder)
        self.images = images.clone()
        current, stream = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and allocates memory
                self.compute()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        torch.clear_autocast_cache()  # the cast of each parameter becomes part of the graph
        with capturing("evaluation"), torch.cuda.graph(graph, stream=stream):
            self.features = self.compute()
        torch.clear_autocast_cache()
        self.graph = graph

    def compute(self) -> Tensor:
        mode = contextlib.nullcontext() if self.shares_compiled else uncompiled()
        with torch.no_grad(), autocast(self.device, self.precision), mode:
            return self.network.features(self.images)


def make_forward(step: TrainingStep | CudaGraphStep) -> EagerForward | CudaGraphForward:
    """The forward pass for evaluations: captured where the step is and the batch is large enough."""
    if isinstance(step, TrainingStep):
        return EagerForward(step.network)
    eager = step.eager
    batch = eager.train.batch_size * eager.train.mu if eager.method.weak == "no_grad" else 0
    if batch < MIN_CAPTURED_BATCH or eager.network.trainable_buffers():
        return EagerForward(eager.network)
    return CudaGraphForward(eager)


def should_compile(compile: bool | None, device: torch.device, steps: int) -> bool:
    """Is a run of `steps` compiled? `compile` None: on a GPU, where the run is long enough to repay it."""
    return compile or (compile is None and device.type == "cuda" and steps >= MIN_COMPILED_STEPS)


def compile_and_capture(step: TrainingStep, *, compile: bool | None, steps: int) -> TrainingStep | CudaGraphStep:
    """The fastest form of `step` for a run of `steps`: captured, with hand-written kernels or compiled; compiled; or as it is.

    compile: True: compile what could be done by hand-written kernels too. Heads and loss are then compiled as well, which saves
    0.2 ms a step on an H200 and takes most of a minute."""
    if not should_compile(compile, step.device, steps):
        return step
    several = step.processes.world_size > 1  # not captured: launching many kernels would take the host too long
    fused = compile is None and not several and fuse_encoder(step.network.encoder, step.precision)
    if not fused:
        compile_encoder(step.network.encoder)
    if several:
        return step
    if not fused:  # heads and loss are some hundred small operations
        step.heads_and_loss = compiled(step.heads_and_loss)  # type: ignore[method-assign]
    # Not captured: a scaled loss (the host decides its scale), and gradient checkpointing (PyTorch asks for the state
    # of the random number generator, which a capture does not allow).
    checkpointing = any(part.checkpointing for part in step.network.encoder.parts())
    can_capture = step.device.type == "cuda" and step.precision != "fp16" and not checkpointing
    if not can_capture:
        return step
    long = fused and steps >= MIN_EPILOGUE_STEPS
    return CudaGraphStep(step, epilogues=long and can_use_epilogues(step.network.encoder, step.precision, step.device))
