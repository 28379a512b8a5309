"""The fast step computes what the plain one does: compiled, and captured as a CUDA graph."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from finessl.data.loader import Prefetcher
from finessl.data.pixel_store import PixelStore
from finessl.errors import FinesslError
from finessl.inference.encode import encode
from finessl.methods import METHODS
from finessl.models.build import compile_encoder, store_frozen
from finessl.models.tuning import TUNINGS
from finessl.recipe import Recipe
from finessl.runtime.distributed import Processes
from finessl.runtime.fp8 import Fp8Linear
from finessl.runtime.precision import autocast
from finessl.training.cuda_graph import CudaGraphForward, CudaGraphStep, EagerForward, compile_and_capture, make_forward
from finessl.training.diagnostics import Diagnostics, hidden_truth
from finessl.training.experiment import Experiment, prepare
from finessl.training.optimizers import make_optimizer
from finessl.training.step import TrainingStep
from finessl.training.timing import random_pixels

gpu = pytest.mark.gpu
TUNINGS_OF_A_VIT = [name for name in TUNINGS.names() if name != "bn"]  # no BatchNorm there


def set_up(device: str, **fields: object) -> tuple[Experiment, TrainingStep]:
    recipe = Recipe.read(None, {
        "data.image_size": 32, "split.labels_per_class": 4, "model.backbone": "vit_tiny_patch16_224",
        "model.pretrained": False, "train.batch_size": 4, "train.steps": 40, "train.precision": "fp32", **fields,
    })  # fmt: skip
    target = torch.device(device)
    torch.manual_seed(0)  # random weights
    experiment = prepare(recipe, None, target, dataset=random_pixels(5, 60, 32))
    network = experiment.network.train()
    optimizer = make_optimizer(network, recipe.train, target)
    precision = recipe.train.precision
    return experiment, TrainingStep(network, experiment.method, optimizer, recipe.train, target, precision, Processes())


def run(experiment: Experiment, step: TrainingStep | CudaGraphStep, steps: int) -> tuple[list[float], torch.Tensor]:
    """Losses, and all trained parameters at the end."""
    views, losses = Prefetcher(experiment.loader(Processes()), steps), []
    for number in range(steps):
        experiment.tuning.before_step(number, steps)
        torch.manual_seed(number)  # dropout
        losses.append(step(number, views.get(number)).loss.clone())
        views.prepare(number + 1)
    parameters = torch.cat([p.detach().float().flatten().cpu() for p in experiment.network.trained().values()])
    return torch.stack(losses).tolist(), parameters


@pytest.mark.parametrize("method", [name for name in METHODS.names() if name not in ("fpl", "ifpl")])  # like grip
def test_every_method_is_one_graph(method: str) -> None:
    """Nothing in a method makes the compiler give up half-way, and it computes the same."""
    torch._dynamo.reset()
    plain_losses, _ = run(*set_up("cpu", **{"method.name": method}), 3)
    experiment, step = set_up("cpu", **{"method.name": method})
    truth = hidden_truth(experiment.dataset, experiment.split)
    step.observe = Diagnostics(experiment.method, truth, experiment.device).observe
    step.heads_and_loss = torch.compile(step.heads_and_loss, backend="aot_eager", fullgraph=True, dynamic=False)  # type: ignore[method-assign]
    assert run(experiment, step, 3)[0] == plain_losses


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_and_plain_runs_agree() -> None:
    """Over 20 steps in float32, where rounding cannot hide a difference."""
    torch._dynamo.reset()
    plain_losses, plain = run(*set_up("cpu"), 20)
    experiment, step = set_up("cpu")
    compile_encoder(experiment.network.encoder)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    losses, parameters = run(experiment, step, 20)
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 8  # once for all blocks, not for each
    assert losses == pytest.approx(plain_losses, rel=1e-4)
    assert torch.allclose(parameters, plain, atol=1e-4)


def test_only_a_gpu_records_the_step() -> None:
    _, step = set_up("cpu")
    assert compile_and_capture(step, compile=None, steps=10_000) is step


@gpu
@pytest.mark.parametrize(
    ("method", "tuning"),
    [(method, "vpt-deep") for method in METHODS.names()] + [("finessl", tuning) for tuning in TUNINGS_OF_A_VIT[1:]],
)
def test_captured_and_eager_steps_are_equal(method: str, tuning: str) -> None:
    """Also with dropout (adaptformer; patches: adapter), a queue (lora), and when what trains changes on the way (lp-ft)."""
    fields = {"tuning.name": tuning, "method.name": method, "train.steps": 16, "train.ema": 0.9}
    fields |= {"train.patch_dropout": 0.5} if tuning == "adapter" else {}
    fields |= {"method.marginal_entropy": 1.0} if tuning == "lora" else {}
    losses, plain = run(*set_up("cuda", **fields), 16)
    experiment, step = set_up("cuda", **fields)
    captured = CudaGraphStep(step)
    again, parameters = run(experiment, captured, 16)
    assert captured.graph is not None
    assert again == pytest.approx(losses, rel=1e-5)
    assert step.ema is not None and not torch.equal(step.ema.average[0], step.ema.parameters[0])
    assert torch.allclose(parameters, plain, rtol=1e-4, atol=1e-6)


@gpu
@pytest.mark.parametrize(
    ("precision", "method", "tolerance"),
    [("fp32", "finessl", 1e-3), ("fp32", "freematch", 1e-3), ("bf16", "supervised", 2e-2)],  # bf16 may turn an argmax
)
def test_compiled_captured_and_eager_steps_agree(precision: str, method: str, tolerance: float) -> None:
    torch._dynamo.reset()
    fields = {"train.precision": precision, "method.name": method}
    losses, plain = run(*set_up("cuda", **fields), 20)
    experiment, step = set_up("cuda", **fields)
    again, parameters = run(experiment, compile_and_capture(step, compile=True, steps=20), 20)
    assert again == pytest.approx(losses, rel=tolerance)
    assert (parameters - plain).norm() / plain.norm() < tolerance


@gpu
@pytest.mark.parametrize("two_sources", [None, False])
@pytest.mark.parametrize(
    ("tuning", "dropped"), [("vpt-deep", 0.0), ("adaptformer", 0.0), ("adaptformer", 0.5), ("linear", 0.0)]
)
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-2), ("fp8", 0.1)])
def test_steps_by_hand_written_kernels_agree_with_eager_ones(
    tuning: str, dropped: float, precision: str, tolerance: float, two_sources: bool | None
) -> None:
    """two_sources False: PyTorch's attention, as for backbones of many tokens.   dropped: share of the patches."""
    fields = {"train.precision": precision, "method.name": "supervised", "tuning.name": tuning, "train.lr": 0.003}
    fields |= {"train.patch_dropout": dropped, "train.patch_dropout_until": 10 / 15_000}
    fields |= {"train.batch_size": 16} | ({"tuning.dropout": 0.0} if tuning == "adaptformer" else {})

    def stored() -> tuple[Experiment, TrainingStep]:
        experiment, step = set_up("cuda", **fields)
        store_frozen(experiment.network.encoder, precision)
        experiment.network.encoder.two_sources = two_sources
        return experiment, step

    losses, plain = run(*stored(), 16)
    experiment, step = stored()
    captured = compile_and_capture(step, compile=None, steps=10_000)
    again, parameters = run(experiment, captured, 16)
    assert experiment.network.encoder.fused is not None
    assert isinstance(captured, CudaGraphStep) and captured.graph is not None
    assert again == pytest.approx(losses, rel=tolerance)
    assert (parameters - plain).norm() / plain.norm() < tolerance


@gpu
@pytest.mark.parametrize("works", [True, False])
def test_epilogues_from_a_fixed_step_on(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported once the first graph is captured; used, with a second capture, from their step on; or not, with a warning."""
    fields = {"train.precision": "bf16", "method.name": "supervised"}
    losses, plain = run(*set_up("cuda", **fields), 16)
    experiment, step = set_up("cuda", **fields)
    events: list[str] = []

    def use(encoder: Any) -> None:
        events.append("used")
        if not works:
            raise ImportError("a library is missing")

    capture = CudaGraphStep.capture
    monkeypatch.setattr(CudaGraphStep, "capture", lambda self, views: [events.append("captured"), capture(self, views)])
    monkeypatch.setattr("finessl.training.cuda_graph.import_epilogues", lambda: events.append("imported"))
    monkeypatch.setattr("finessl.training.cuda_graph.use_epilogues", use)
    monkeypatch.setattr("finessl.training.cuda_graph.EPILOGUE_STEP", 8)
    with nullcontext() if works else pytest.warns(UserWarning, match="a library is missing"):
        again, parameters = run(experiment, CudaGraphStep(step, epilogues=True), 16)
    assert events == ["captured", "imported", "used"] + ["captured"] * works
    assert again == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(parameters, plain, rtol=1e-4, atol=1e-6)


@gpu
@pytest.mark.parametrize(("method", "compile"), [("finessl", False), ("supervised", True)])
def test_captured_steps_in_fp8(method: str, compile: bool) -> None:
    """Forward and backward of the frozen layers. Compiled kernels round at other places, so that losses are only close."""
    torch._dynamo.reset()
    fields = {
        "train.precision": "fp8",
        "method.name": method,
        "train.batch_size": 16,
        "train.steps": 16,
        "train.lr": 0.003,
    }

    def in_fp8() -> tuple[Experiment, TrainingStep]:
        experiment, step = set_up("cuda", **fields)
        store_frozen(experiment.network.encoder, "fp8")
        assert any(isinstance(module, Fp8Linear) for module in experiment.network.modules())
        return experiment, step

    losses, plain = run(*in_fp8(), 16)
    experiment, step = in_fp8()
    captured = compile_and_capture(step, compile=True, steps=16) if compile else CudaGraphStep(step)
    again, parameters = run(experiment, captured, 16)
    assert isinstance(captured, CudaGraphStep) and captured.graph is not None
    tolerance = 0.1 if compile else 1e-3
    assert again == pytest.approx(losses, rel=tolerance, abs=tolerance * max(losses))
    assert (parameters - plain).norm() / plain.norm() < tolerance


@gpu
def test_a_reset_network_is_captured_again() -> None:
    experiment, step = set_up("cuda")
    captured = CudaGraphStep(step)
    run(experiment, captured, 6)
    first = captured.graph
    experiment.network.reset()
    captured.clear_optimizer()
    losses, _ = run(experiment, captured, 6)
    assert captured.graph is not None and captured.graph is not first
    assert losses == pytest.approx(run(*set_up("cuda"), 6)[0], rel=1e-4)


@gpu
def test_running_statistics_are_captured_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchNorm moves them in the weak and in the trained pass, which then may not run concurrently."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    fields = {"model.backbone": "resnet18", "data.image_size": 64, "tuning.name": "bn"}
    plain, step = set_up("cuda", **fields)
    run(plain, step, 12)
    experiment, step = set_up("cuda", **fields)
    run(experiment, CudaGraphStep(step), 12)
    for name, buffer in experiment.network.trainable_buffers().items():
        expected = plain.network.trainable_buffers()[name].float()
        assert (buffer - expected).norm() <= 1e-3 * expected.norm(), name


def test_a_step_that_cannot_be_captured_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA's part played by stand-ins: after a real failure a process is of no more use to the tests after it."""

    @contextmanager
    def refuse(*arguments: Any, **options: Any) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    for name, stand_in in (("Stream", lambda *a, **k: None), ("CUDAGraph", object), ("graph", refuse)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    experiment, step = set_up("cpu", **{"method.name": "supervised"})
    monkeypatch.setattr(CudaGraphStep, "EAGER_STEPS", 0)
    monkeypatch.setattr(TrainingStep, "compute", lambda self, views: None)
    with pytest.raises(FinesslError, match=r"stream is capturing\. .*--no-compile"):
        CudaGraphStep(step)(0, experiment.loader(Processes()).load(0))
    assert step.side_stream is None


@gpu
@pytest.mark.parametrize("tuning", ["vpt-deep", "lora", "full"])
def test_captured_forward_follows_the_parameters(tuning: str) -> None:
    torch._dynamo.reset()
    _, step = set_up("cuda", **{"tuning.name": tuning, "train.precision": "bf16"})
    forward, images = CudaGraphForward(step), torch.randn(8, 3, 32, 32, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        with torch.no_grad(), autocast(step.device, "bf16"):
            expected = step.network(images)
            given = forward(images)
        torch.testing.assert_close(given.logits, expected.logits)
        torch.testing.assert_close(given.aux, expected.aux)
        with torch.no_grad():
            for parameter in step.parameters:
                parameter.add_(0.05 * torch.randn_like(parameter))
        images = torch.randn_like(images)


@pytest.mark.parametrize("count", [3, 8, 21])
def test_a_function_gets_batches_of_one_size(count: int) -> None:
    store = PixelStore.from_array(np.random.default_rng(0).integers(0, 256, (21, 8, 8, 3), dtype=np.uint8))
    own: dict[str, Any] = {"size": 8, "mean": (0.5,) * 3, "std": (0.5,) * 3, "device": torch.device("cpu")}
    sizes: list[int] = []

    def total(images: torch.Tensor) -> torch.Tensor:
        sizes.append(len(images))
        return images.sum((2, 3))

    indices = np.arange(21)[::-1][:count].copy()
    plain = encode(total, store, indices=indices, **own)
    sizes.clear()
    torch.testing.assert_close(encode(total, store, indices=indices, batch=16, rows=8, **own), plain)
    assert set(sizes) == {8} and len(sizes) == -(-count // 8) and plain.shape == (count, 3)


def test_heads_run_after_every_captured_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head may keep what it has worked out until it trains again (CoOp): nothing of it may be part of the graph. With
    CUDA's part played by stand-ins: a graph that computes again what lay between its beginning and its end."""
    _, step = set_up("cpu")
    network, capturing = step.network.eval(), False
    forward = CudaGraphForward(step)

    @contextmanager
    def capture(*arguments: Any, **options: Any) -> Iterator[None]:
        nonlocal capturing
        capturing = True
        yield
        capturing = False

    class Graph:
        def replay(self) -> None:
            forward.features.copy_(forward.compute())

    classify = network.classify

    def outside(features: torch.Tensor) -> Any:
        assert not capturing
        return classify(features)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in (
        ("Stream", lambda device: stream), ("current_stream", lambda device: stream), ("CUDAGraph", Graph),
        ("graph", capture), ("stream", lambda stream: nullcontext()),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(network, "classify", outside)
    for _ in range(3):
        images = torch.randn(8, 3, 32, 32)
        with torch.no_grad():
            torch.testing.assert_close(forward(images), network(images))
            for parameter in step.parameters:
                parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize(
    ("batch", "method", "expected"), [(32, "finessl", 32), (31, "finessl", 0), (32, "pseudo-label", 0)]
)
def test_evaluation_takes_the_weak_views_batch(
    monkeypatch: pytest.MonkeyPatch, batch: int, method: str, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda *a, **k: None)
    experiment, step = set_up("cpu", **{"train.batch_size": batch, "method.name": method})
    forward = make_forward(CudaGraphStep(step))
    assert forward.batch_size == expected and isinstance(forward, CudaGraphForward) is (expected > 0)
    assert isinstance(make_forward(step), EagerForward)
