"""Odd batches, half precision, where gradients go, and that a step never waits for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from methods_cases import Case, draw, make, run, tensors
from torch.utils._python_dispatch import TorchDispatchMode

from finessl.methods import METHODS
from finessl.methods.base import HeadOutputs, Outputs

NAMES = METHODS.names()
FORM_CASES = [(name, {}) for name in NAMES] + [
    ("finessl", {"form": "paper"}),
    ("finessl", {"without": ["dls"]}),
    ("finessl", {"without": ["bms"]}),
    ("flexmatch", {"warmup": False}),
    ("softmatch", {"align": False}),
]


def finite(name: str, case: Case, dtype: torch.dtype = torch.float32, classes: int = 5, **options: Any) -> Any:
    """Three steps on the same batch, with gradients; everything finite."""
    method = make(name, options, classes=classes)
    for step in range(3):
        outputs, batch = tensors(case, method, dtype, grad=True)
        method.before_step(step)
        result = method(outputs, batch)
        result.loss.backward()
        assert result.loss.dtype in (torch.float32, torch.float64) and result.loss.isfinite()
        assert all(value.isfinite() for value in result.statistics.values())
        assert outputs.labeled.logits.grad is not None
        for view in (outputs.labeled, outputs.weak, outputs.strong):
            for part in view or ():
                assert part is None or part.grad is None or part.grad.isfinite().all()
    for buffer in method.buffers():
        assert buffer.isfinite().all()
    return result


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize(
    "shape", [{"labeled": 2, "unlabeled": 14}, {"labeled": 8, "unlabeled": 3}, {"labeled": 1, "unlabeled": 1}],
    ids=["mu=7", "fewer unlabeled than labeled", "one image each"],
)  # fmt: skip
def test_batch_shapes(name: str, views: int, shape: dict[str, int]) -> None:
    finite(name, draw(0, views=views, **shape))


@pytest.mark.parametrize("name", NAMES)
def test_two_classes(name: str) -> None:
    finite(name, draw(0, classes=2), classes=2)


@pytest.mark.parametrize(("name", "options"), FORM_CASES)
@pytest.mark.parametrize("soft", [False, True])
def test_no_confident_image(name: str, options: dict[str, Any], soft: bool) -> None:
    case = draw(0, soft=soft)
    case.w *= 0.01
    case.aux_w *= 0.01
    result = finite(name, case, **options)
    if name in ("pseudo-label", "fixmatch", "debiaspl"):
        assert result.statistics["used"] == 0 and result.statistics["loss_unlabeled"] == 0


def test_freematch_without_a_selected_image_has_no_fairness_loss() -> None:
    method = make("freematch")
    method.threshold.value.fill_(1.0)  # type: ignore[union-attr]
    outputs, batch = tensors(draw(0, scale=0.1), method, torch.float32, grad=True)
    result = method(outputs, batch)
    result.loss.backward()
    assert result.statistics["used"] == 0 and result.statistics["loss_fairness"] == 0
    assert outputs.strong is not None and outputs.strong.logits.grad.abs().sum() == 0  # type: ignore[union-attr]
    assert result.loss.isfinite()


@pytest.mark.parametrize(("name", "options"), FORM_CASES)
def test_a_class_never_predicted(name: str, options: dict[str, Any]) -> None:
    case = draw(0)
    for field in (case.w, case.s, case.aux_w, case.aux_s):
        field[..., 2] = -60.0
    finite(name, case, **options)


@pytest.mark.parametrize("name", ["debiaspl", "softmatch", "freematch"])
def test_averages_that_have_reached_zero(name: str) -> None:
    """After very many steps a class never predicted has an average that underflows, as has a variance."""
    method = make(name)
    for part in method.children():
        if hasattr(part, "value") and part.value.ndim == 1:  # type: ignore[union-attr]
            part.value[2] = 0.0  # type: ignore[index, operator]
    if name == "softmatch":
        method.variance.value.zero_()  # type: ignore[union-attr]
    case = draw(0, unlabeled=3)
    case.w[:] = case.w[0]
    case.w[..., 2] = case.s[..., 2] = -1e4
    result = run(method, case, dtype=torch.float32)
    assert result.loss.isfinite() and all(value.isfinite() for value in result.statistics.values())


@pytest.mark.parametrize(("name", "options"), FORM_CASES)
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(name: str, options: dict[str, Any], soft: bool, dtype: torch.dtype) -> None:
    case = draw(0, soft=soft, scale=100.0)  # e^100 is far beyond float16
    assert finite(name, case, dtype, **options).loss.dtype == torch.float32
    # the loss of the rounded logits, computed in float64
    case = draw(1, soft=soft)
    for field in ("x", "w", "s", "aux_x", "aux_w", "aux_s"):
        setattr(case, field, torch.tensor(getattr(case, field)).to(dtype).double().numpy())
    half, exact = run(make(name, options), case, dtype=dtype), run(make(name, options), case, dtype=torch.float64)
    torch.testing.assert_close(half.loss.double(), exact.loss.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_soft_targets_that_are_one_hot_are_class_ids(name: str) -> None:
    case, soft = draw(0), draw(0)
    soft.y = np.eye(5)[case.y]
    for first in (0, 1):
        one, other = make(name), make(name)
        if first:  # with margins
            run(one, draw(5)), run(other, draw(5))
        torch.testing.assert_close(run(one, case).loss, run(other, soft).loss, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "options"), FORM_CASES)
def test_gradients_go_where_they_should_and_nowhere_else(name: str, options: dict[str, Any]) -> None:
    method = make(name, options)
    method.before_step(10)
    outputs, batch = tensors(draw(0), method, grad=True)
    result = method(outputs, batch)
    result.loss.backward()

    def gradient(view: HeadOutputs | None, head: str) -> torch.Tensor | None:
        return None if view is None or getattr(view, head) is None else getattr(view, head).grad

    def moves(view: HeadOutputs | None, head: str) -> bool:
        at = gradient(view, head)
        return at is not None and bool((at != 0).any())

    assert moves(outputs.labeled, "logits")
    assert moves(outputs.weak, "logits") == (method.weak == "grad")
    assert moves(outputs.strong, "logits") == method.strong
    assert not moves(outputs.weak, "aux")
    assert moves(outputs.labeled, "aux") == moves(outputs.strong, "aux") == (method.aux is not None)
    trained = outputs.weak if method.weak == "grad" else outputs.strong
    if trained is not None and result.weight is not None and name != "freematch":  # its fairness loss mixes images
        rows = gradient(trained, "logits").abs().sum(1).reshape(-1, len(result.weight)) > 0  # type: ignore[union-attr]
        assert (rows == (result.weight > 0)).all()  # images of weight 0 teach nothing


class NoWaiting(TorchDispatchMode):
    """Refuses operations whose result's value or shape the host must wait for on a GPU."""

    refused = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "bincount", "unique", "equal.default")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(word in name for word in self.refused) or (
            name.startswith(("aten.index.", "aten.index_put"))
            and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        ):
            raise AssertionError(f"{name} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "options"), FORM_CASES)
@pytest.mark.parametrize("soft", [False, True])
def test_no_host_synchronisation_in_forward_and_backward(name: str, options: dict[str, Any], soft: bool) -> None:
    method = make(name, options)
    outputs, batch = tensors(draw(0, soft=soft), method, torch.float32, grad=True)
    method.before_step(0)
    with NoWaiting():
        method(outputs, batch).loss.backward()


@pytest.mark.parametrize(
    "waits",
    [lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: int(x[0])],
)
def test_the_check_for_synchronisation_sees_them(waits: Any) -> None:
    with NoWaiting(), pytest.raises(AssertionError, match="wait"):
        waits(torch.randn(3))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "options"), FORM_CASES)
def test_no_synchronisation_on_a_gpu_and_the_same_loss_as_on_the_cpu(name: str, options: dict[str, Any]) -> None:
    method, twin = make(name, options), make(name, options)
    method.cuda()
    for step in range(3):
        outputs, batch = tensors(draw(step), method, torch.float32)
        expected = twin(outputs, batch).loss

        def moved(view: HeadOutputs | None) -> HeadOutputs | None:
            return view and HeadOutputs(*(None if part is None else part.cuda().requires_grad_() for part in view))

        there = Outputs(moved(outputs.labeled), moved(outputs.weak), moved(outputs.strong))  # type: ignore[arg-type]
        batch.labels, batch.index = batch.labels.cuda(), batch.index.cuda()  # type: ignore[union-attr]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = method(there, batch)
            result.loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(result.loss.cpu(), expected, rtol=1e-4, atol=1e-5)
