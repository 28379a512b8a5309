"""Every method against its NumPy twin in reference.py: loss, pseudo-labels, weights and state over several steps."""

from __future__ import annotations

import inspect
from typing import Any

import methods_reference as reference
import numpy as np
import pytest
import torch
from methods_cases import SELF_TRAINING, draw, make, run, task, tensors

from finessl.errors import FinesslError
from finessl.methods import METHODS, create
from finessl.methods.base import Method
from finessl.methods.finessl import FORMS
from finessl.registry.options import options_of

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("supervised", {}),
    ("pseudo-label", {}),
    ("pseudo-label", {"threshold": 0.5, "warmup": 0.0, "unlabeled_weight": 2.5}),
    ("fixmatch", {}),
    ("fixmatch", {"threshold": 0.9, "unlabeled_weight": 0.3}),
    ("flexmatch", {}),
    ("flexmatch", {"warmup": False, "threshold": 0.95, "unlabeled_weight": 2.0}),
    ("freematch", {}),
    ("freematch", {"momentum": 0.5, "entropy_weight": 0.7, "unlabeled_weight": 2.0}),
    ("softmatch", {}),
    ("softmatch", {"momentum": 0.6, "n_sigma": 3.0, "unlabeled_weight": 2.0}),
    ("softmatch", {"align": False, "momentum": 0.6}),
    ("debiaspl", {}),
    ("debiaspl", {"momentum": 0.5, "debias": 1.0, "threshold": 0.5, "unlabeled_weight": 10.0}),
    ("finessl", {}),
    ("finessl", {"form": "released"}),
    ("finessl", {"form": "paper"}),
    *[("finessl", {option: value}) for option, value in FORMS["paper"]._asdict().items()],
    *[
        ("finessl", {"without": [part]})
        for part in ("bms", "margin-in-labeled", "dynamic-alpha", "dls", "ls", "detach")
    ],
    ("finessl", {"without": ["dynamic-alpha", "dls"], "pace_empty": "one", "margin_shape": "linear"}),
    ("finessl", {"alpha": 2.0, "gamma": 1.0, "smoothing": 0.2, "pace_threshold": 0.4, "min_weight": 0.6}),
    ("finessl", {"aux_threshold": 0.9, "aux_reduction": "all", "aux_margin": True}),
    ("finessl", {"marginal_entropy": 0.7}),
]  # fmt: skip


def name_of(setting: tuple[str, dict[str, Any]]) -> str:
    return f"{setting[0]}-{len(setting[1])}-{next(iter(setting[1].items()), ('default', ''))}"


def twin(method: Method, name: str, options: dict[str, Any]) -> Any:
    """The reference with the same task, the given options and the real class's defaults for the others."""
    defaults = {option: parameter.default for option, parameter in options_of(METHODS[name]).items()}
    if name == "finessl":
        defaults |= FORMS[options.get("form", "released")]._asdict()
    t = method.task
    make_twin = getattr(reference, METHODS[name].__name__)
    return make_twin(t.classes, t.unlabeled, t.steps, t.epoch_steps, t.labeled, **(defaults | options))


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_loss_labels_and_weights_over_steps(setting: tuple[str, dict[str, Any]], views: int, float64: None) -> None:
    name, options = setting
    method = create(name, task(epoch_steps=4), options)
    slow = twin(method, name, options)
    for step in range(6):  # the pace is reset at step 4
        case = draw(step, views=views, scale=4.0 if step in (1, 5) else 2.5)
        result = run(method, case, step)
        loss, labels, weights = slow.step(step, **vars(case))
        np.testing.assert_allclose(float(result.loss), loss, rtol=1e-10)
        if labels is None:
            assert result.pseudo is None and result.weight is None
            continue
        assert result.pseudo is not None and result.weight is not None
        assert result.pseudo.tolist() == labels
        np.testing.assert_allclose(result.weight.numpy(), weights, rtol=1e-10)
        assert float(result.statistics["used"]) == pytest.approx(np.mean(np.array(weights) > 0))
        for statistic in result.statistics.values():
            assert statistic.ndim == 0 and not statistic.requires_grad
    check_state(method, slow)


def check_state(method: Any, slow: Any) -> None:
    if hasattr(slow, "selected"):
        memory = [slow.selected.get(i, -1) for i in range(slow.M)]
        assert method.pace.memory.tolist() == memory
        assert method.pace.counts.tolist() == [memory.count(k) for k in range(slow.C)]
    state = {
        "FreeMatch": lambda: [
            (method.threshold.value, slow.tau), (method.histogram.value, slow.h)
        ],
        "SoftMatch": lambda: [(method.mean.value, slow.mu), (method.variance.value, slow.var)],
        "DebiasPL": lambda: [(method.distribution.value, slow.q)],
    }.get(type(slow).__name__, list)()  # fmt: skip
    if getattr(slow, "p", None) is not None:
        np.testing.assert_allclose(method.distribution.value.numpy(), slow.p, rtol=1e-10)
    for ours, theirs in state:
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10)


def test_the_cases_are_not_trivial(float64: None) -> None:
    """Some images pass and some fail, so that the comparison above sees both sides of every mask."""
    for name in ("pseudo-label", "fixmatch", "flexmatch", "freematch", "debiaspl"):
        method = create(name, task(), {"freematch": {"momentum": 0.5}, "flexmatch": {"warmup": False}}.get(name))
        weights = torch.cat([run(method, draw(step, scale=2.5), step).weight for step in range(6)])  # type: ignore[misc]
        assert 0 < weights.mean() < 1, name


@pytest.mark.parametrize(("warmup", "passes"), [(False, [True, True, False, True]), (True, [True, True, True, True])])
def test_flexmatch_thresholds_by_hand(warmup: bool, passes: list[bool]) -> None:
    """σ = (6, 4, 0) of 40 images: β = (1, 2/3, 0) and thresholds 0.7 · (1, 1/2, 0); with the 30 images never selected
    in the maximum, β = (1/5, 2/15, 0) and thresholds 0.7 · (1/9, 1/14, 0)."""
    method = create("flexmatch", task(classes=3, unlabeled=40), {"warmup": warmup})
    method.pace.update(torch.arange(10), torch.tensor([0] * 6 + [1] * 4), torch.ones(10, dtype=torch.bool))  # type: ignore[operator, union-attr]
    case = draw(0, classes=3, unlabeled=4, images=40)
    case.w = np.log([[0.1, 0.4, 0.5], [0.3, 0.36, 0.34], [0.68, 0.2, 0.12], [0.75, 0.2, 0.05]])
    result = run(method, case)
    assert result.weight is not None and result.weight.bool().tolist() == passes
    expected = 0.7 * (1 / 9 + 1 / 14) / 3 if warmup else 0.7 * 1.5 / 3
    assert float(result.statistics["threshold"]) == pytest.approx(expected)


@pytest.mark.parametrize("name", SELF_TRAINING)
@pytest.mark.parametrize("balance", ["pseudo/labeled", "labeled/pseudo", "none"])
def test_self_training_against_reference(name: str, balance: str, float64: None) -> None:
    method = create(name, task(classes=3, unlabeled=40, labeled=7), {"balance": balance})
    slow = reference.SelfTraining(3, 40, 20, 500, 7, balance=balance)
    for step in range(6):
        case = draw(step, classes=3, images=40)
        if step == 2 or (step == 4 and name != "fpl"):
            probabilities = np.random.default_rng(step).dirichlet(np.ones(3), 40)
            method.refresh(torch.tensor(probabilities, dtype=torch.float32))
            shots = method.shots(step // 2)  # type: ignore[operator]
            slow.refresh(probabilities.astype(np.float32), shots)
        result = run(method, case, step)
        loss, labels, weights = slow.step(step, **vars(case))
        np.testing.assert_allclose(float(result.loss), loss, rtol=1e-10)
        assert result.pseudo is not None and result.pseudo.tolist() == labels
        assert result.weight is not None and result.weight.tolist() == weights
    assert method.pseudo.tolist() == slow.pseudo


@pytest.mark.parametrize("name", METHODS.names())
def test_state_round_trips_through_a_checkpoint(name: str, tmp_path: Any) -> None:
    first = make(name, epoch_steps=2)
    for step in range(3):
        run(first, draw(step), step)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = create(name, first.task)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in range(3, 7):
        one, other = run(first, draw(step), step), run(second, draw(step), step)
        assert torch.equal(one.loss, other.loss)
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key
    assert (first.pool() is None) == (second.pool() is None)


@pytest.mark.parametrize("name", METHODS.names())
def test_buffers_are_small_but_for_one_integer_per_image(name: str) -> None:
    method = create(name, task(classes=5, unlabeled=1000))
    sizes = [buffer.numel() for buffer in method.buffers()]
    assert all(size <= 5 or size == 1000 for size in sizes) and sizes.count(1000) <= 1
    assert not list(method.parameters())


@pytest.mark.parametrize("name", METHODS.names())
def test_options_are_keyword_only_with_types_and_defaults(name: str) -> None:
    signature = inspect.signature(METHODS[name])
    assert list(signature.parameters)[0] == "task"
    for option, parameter in list(signature.parameters.items())[1:]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, option
        assert parameter.default is not inspect.Parameter.empty, option
        assert parameter.annotation is not inspect.Parameter.empty, option
    assert len(METHODS.summary(name)) > 10


def test_thresholds_default_to_the_papers() -> None:
    for name in ("pseudo-label", "fixmatch", "flexmatch", "debiaspl"):
        assert options_of(METHODS[name])["threshold"].default == 0.7
    for name in ("pseudo-label", "fixmatch", "flexmatch", "freematch", "softmatch", "debiaspl"):
        assert options_of(METHODS[name])["unlabeled_weight"].default == 1.0


def test_options_from_the_command_line_are_read() -> None:
    method = create("finessl", task(), {"without": "dls,ls", "aux_threshold": "none", "alpha": "4"})
    assert (
        method.without == {"dls", "ls"}
        and method.switches.aux_threshold is None
        and method.alpha == 4
        and method.aux is None
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fixmtch", {}, "fixmatch"),
        ("fixmatch", {"treshold": 0.5}, "threshold"),
        ("fixmatch", {"threshold": 95}, "threshold = 95 should be a number between 0 and 1"),
        ("fixmatch", {"unlabeled_weight": -1}, "unlabeled_weight = -1 should be a number between 0 and"),
        ("finessl", {"margin_shape": "square"}, "margin_shape"),
        ("finessl", {"without": ["bns"]}, "bms"),
        ("finessl", {"smoothing": 1.5}, "smoothing"),
        ("grip", {"iterations": 0}, "iterations"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FinesslError, match=message):
        create(name, task(), options)


def test_one_class_and_a_missing_view_are_refused() -> None:
    with pytest.raises(FinesslError, match="2 classes"):
        create("fixmatch", task(classes=1))
    with pytest.raises(FinesslError, match="labeled"):
        create("fpl", task(labeled=0))
    fixmatch, supervised = create("fixmatch", task()), create("supervised", task())
    with pytest.raises(FinesslError, match="weak view"):
        fixmatch(*tensors(draw(0), supervised))


def test_every_method_has_a_reference() -> None:
    """A new method needs an independent implementation, and a setting that compares the two."""
    assert {name for name, _ in SETTINGS} | set(SELF_TRAINING) == set(METHODS.names())
