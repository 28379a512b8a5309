"""FineSSL's equations against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from methods_cases import draw, run, task, tensors

from finessl.methods import create
from finessl.methods.base import Batch, HeadOutputs, Outputs, Task
from finessl.methods.finessl import FORMS, FineSSL, Switches
from finessl.methods.parts import cross_entropy, smooth
from finessl.registry.options import options_of

LN2, LN3 = math.log(2), math.log(3)


def tensor(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def with_pace(counts: list[int], **options: Any) -> FineSSL:
    method = FineSSL(Task(classes=len(counts), unlabeled=100, steps=10), **options)
    method.pace.counts.copy_(torch.tensor(counts))
    return method


def margins(counts: list[int], **options: Any) -> list[float]:
    return with_pace(counts, **options).margins(torch.float64).tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # β = (1, 1/2, 1/4), α_t = 8 · (1 − 1/4) = 6
        ({}, [0.0, 6 / 3, 6 * 0.6]),
        ({"margin_shape": "linear"}, [0.0, 6 * 0.5, 6 * 0.75]),
        ({"alpha": 1.0}, [0.0, 0.75 / 3, 0.75 * 0.6]),
        ({"without": ("dynamic-alpha",)}, [0.0, 8 / 3, 8 * 0.6]),
        ({"without": ("dynamic-alpha",), "margin_shape": "linear"}, [0.0, 4.0, 6.0]),
    ],
)
def test_margins_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    assert margins([4, 2, 1], **options) == pytest.approx(expected)


def test_margin_of_a_class_never_predicted_is_alpha() -> None:
    assert margins([5, 5, 0]) == [0, 0, 8]


@pytest.mark.parametrize("without", [(), ("dynamic-alpha",)])
def test_margin_while_nothing_is_selected(without: tuple[Any, ...]) -> None:
    assert margins([0, 0, 0], without=without) == [0, 0, 0]
    assert margins([0, 0, 0], pace_empty="one", without=without) == [8, 8, 8]


def test_equal_paces_give_no_margin() -> None:
    assert margins([3, 3, 3]) == margins([3, 3, 3], margin_shape="linear", pace_empty="one") == [0, 0, 0]


def test_balanced_margin_softmax_by_hand() -> None:
    logits = tensor([LN3, 0.0, 0.0])
    margin = tensor(LN2, 0.0, math.log(4))
    # eq. 3, y = 0: 3 / (3 + 2 + 2); y = 1 has no margin: 1 / (3 + 1 + 1); y = 2: 1 / (1 + 4·3 + 4·1)
    for label, probability in ((0, 3 / 7), (1, 1 / 5), (2, 1 / 17)):
        loss = cross_entropy(logits, torch.tensor([label]), margin)
        assert loss.tolist() == pytest.approx([-math.log(probability)])
    soft = cross_entropy(logits, tensor([0.5, 0.25, 0.25]), margin)
    assert soft.tolist() == pytest.approx([-0.5 * math.log(3 / 7) - 0.25 * math.log(1 / 5) - 0.25 * math.log(1 / 17)])


def test_label_smoothing_by_hand() -> None:
    label = torch.tensor([1])
    assert smooth(label, 5, 0.5, "c-1", torch.float64).tolist() == [[0.125, 0.5, 0.125, 0.125, 0.125]]
    assert smooth(label, 5, 0.5, "c", torch.float64)[0].tolist() == pytest.approx([0.1, 0.6, 0.1, 0.1, 0.1])
    assert smooth(label, 2, 0.5, "c-1", torch.float64).tolist() == [[0.5, 0.5]]
    assert smooth(label, 2, 0.5, "c", torch.float64).tolist() == [[0.25, 0.75]]
    assert smooth(label, 3, 0.0, "c").tolist() == smooth(label, 3, 0.0, "c-1").tolist() == [[0, 1, 0]]


def one_image_each() -> tuple[Outputs, Batch]:
    outputs = Outputs(
        labeled=HeadOutputs(tensor([0.0, LN3]), tensor([0.0, 0.0])),
        weak=HeadOutputs(tensor([0.0, math.log(9)]), tensor([LN3, 0.0])),  # main: class 1 at 0.9; auxiliary: 0.75
        strong=HeadOutputs(tensor([0.0, 0.0]), tensor([0.0, LN3])),
    )
    outputs.labeled, outputs.weak, outputs.strong = (
        HeadOutputs(v.logits.reshape(1, 2), v.aux.reshape(1, 2))
        for v in (outputs.labeled, outputs.weak, outputs.strong)  # type: ignore[union-attr]
    )
    return outputs, Batch(torch.tensor([1]), torch.tensor([7]))


# β = (1, 1/2), so with α = 6 ln 2 the margin of class 1 is 6 ln 2 · 1/2 · 1/3 = ln 2, that of class 0 is 0
LABELED = math.log(5 / 3)  # 3 / (3 + 2)
UNLABELED = LN3  # 1 / (1 + 2), before its weight
AUX_LABELED = LN2
AUX_UNLABELED = 0.5 * math.log(4) + 0.5 * math.log(4 / 3)  # λ = 1/2 of two classes is (1/2, 1/2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, LABELED + 3 * 0.75 * UNLABELED + AUX_LABELED + AUX_UNLABELED),
        ({"gamma": 0.5}, LABELED + 0.5 * 0.75 * UNLABELED + AUX_LABELED + AUX_UNLABELED),
        ({"min_weight": 0.8}, LABELED + AUX_LABELED + AUX_UNLABELED),
        ({"aux_threshold": 0.95}, LABELED + 3 * 0.75 * UNLABELED + AUX_LABELED),
        ({"without": ("bms",)}, math.log(4 / 3) + 3 * 0.75 * LN2 + AUX_LABELED + AUX_UNLABELED),
        ({"without": ("margin-in-labeled",)}, math.log(4 / 3) + 3 * 0.75 * LN3 + AUX_LABELED + AUX_UNLABELED),
        # α constant: the margin of class 1 is 6 ln 2 / 3 = ln 4
        ({"without": ("dynamic-alpha",)}, math.log(7 / 3) + 3 * 0.75 * math.log(5) + AUX_LABELED + AUX_UNLABELED),
        ({"without": ("dls",)}, LABELED + 3 * 0.9 * UNLABELED),
        ({"without": ("ls",)}, LABELED + 3 * 0.75 * UNLABELED + AUX_LABELED + math.log(4 / 3)),
        ({"without": ("detach",)}, LABELED + 3 * 0.75 * UNLABELED + AUX_LABELED + AUX_UNLABELED),
        # the auxiliary loss with margins: −½ log(1/4) for class 0, −½ log(3/5) for class 1
        ({"aux_margin": True}, LABELED + 2.25 * LN3 + AUX_LABELED + 0.5 * math.log(4) + 0.5 * math.log(5 / 3)),
        # this image counts first: σ = (2, 2), no margin anywhere
        ({"pace_update": "before"}, math.log(4 / 3) + 2.25 * LN2 + AUX_LABELED + AUX_UNLABELED),
    ],
)
def test_total_loss_by_hand(options: dict[str, Any], expected: float) -> None:
    method = with_pace([2, 1], alpha=6 * LN2, **options)
    result = method(*one_image_each())
    assert float(result.loss) == pytest.approx(expected, rel=1e-12)
    assert method.pace.counts.tolist() == [2, 2] and int(method.pace.memory[7]) == 1


def test_statistics_by_hand() -> None:
    statistics = with_pace([2, 1], alpha=6 * LN2)(*one_image_each()).statistics
    assert {name: pytest.approx(float(value)) for name, value in statistics.items()} == {
        "loss_labeled": LABELED,
        "loss_unlabeled": 0.75 * UNLABELED,
        "used": 1.0,
        "confidence": 0.9,
        "margin": LN2 / 2,
        "margin_max": LN2,
        "loss_aux_labeled": AUX_LABELED,
        "loss_aux_unlabeled": AUX_UNLABELED,
        "confidence_aux": 0.75,
    }


def test_auxiliary_head_wanted() -> None:
    assert FineSSL(task()).aux == "detached"
    assert FineSSL(task(), without=("detach",)).aux == "attached"
    assert FineSSL(task(), without=("dls",)).aux is None


def test_pace_is_reset_at_each_epoch_or_never() -> None:
    for reset, empty in (("epoch", True), ("never", False)):
        method = create("finessl", task(epoch_steps=3), {"pace_reset": reset})
        for step in range(3):
            run(method, draw(step), step)
            assert int(method.pace.counts.sum()) > 0
        method.before_step(3)
        assert (int(method.pace.counts.sum()) == 0) == empty
        assert bool((method.pace.memory == -1).all()) == empty


def test_an_image_that_loses_its_confidence() -> None:
    """Released: its old label stays; paper: σ loses it."""
    outputs, batch = one_image_each()
    for forget, counts in ((False, [2, 2]), (True, [2, 1])):
        method = with_pace([2, 1], pace_forget=forget)
        method(outputs, batch)
        unsure = Outputs(outputs.labeled, HeadOutputs(outputs.weak.logits / 100, outputs.weak.aux), outputs.strong)  # type: ignore[union-attr, operator]
        method(unsure, batch)
        assert method.pace.counts.tolist() == counts
        assert int(method.pace.memory[7]) == (-1 if forget else 1)


def test_a_switch_follows_the_form_unless_it_is_given() -> None:
    def switches(**options: Any) -> Switches:
        return create("finessl", task(), options).switches  # type: ignore[return-value]

    assert switches() == switches(form="released") == FORMS["released"] and switches(form="paper") == FORMS["paper"]
    assert all(a != b for a, b in zip(FORMS["paper"], FORMS["released"], strict=True))
    for name, value in FORMS["paper"]._asdict().items():
        assert switches(**{name: value}) == FORMS["released"]._replace(**{name: value})
        other = getattr(FORMS["released"], name)
        assert switches(form="paper", **{name: other}) == FORMS["paper"]._replace(**{name: other})
        assert switches(form="paper", **{name: "form"}) == FORMS["paper"]


def test_the_defaults_are_the_papers_numbers() -> None:
    defaults = {name: parameter.default for name, parameter in options_of(FineSSL).items()}
    assert (defaults["alpha"], defaults["gamma"], defaults["smoothing"], defaults["pace_threshold"]) == (8, 3, 0.5, 0.7)


def test_gradients_reach_each_head_by_its_own_losses_only() -> None:
    """γ scales what the main head gets from strong views and nothing else; λ moves the auxiliary head only."""

    def gradients(**options: Any) -> dict[str, torch.Tensor | None]:
        method = create("finessl", task(), options)
        run(method, draw(1))
        outputs, batch = tensors(draw(0), method, grad=True)
        method(outputs, batch).loss.backward()
        views = {"labeled": outputs.labeled, "weak": outputs.weak, "strong": outputs.strong}
        return {f"{n}.{head}": getattr(v, head).grad for n, v in views.items() for head in ("logits", "aux")}

    plain, gamma, smoothing = gradients(), gradients(gamma=6.0), gradients(smoothing=0.1)
    assert plain["weak.logits"] is None and plain["weak.aux"] is None
    for name in ("labeled.logits", "labeled.aux", "strong.aux"):
        assert plain[name].abs().sum() > 0  # type: ignore[union-attr]
        torch.testing.assert_close(plain[name], gamma[name], rtol=0, atol=0)
    torch.testing.assert_close(2 * plain["strong.logits"], gamma["strong.logits"])  # type: ignore[operator]
    for name in ("labeled.logits", "labeled.aux", "strong.logits"):
        torch.testing.assert_close(plain[name], smoothing[name], rtol=0, atol=0)
    assert not torch.equal(plain["strong.aux"], smoothing["strong.aux"])  # type: ignore[arg-type]


def test_gradient_of_the_balanced_margin_softmax() -> None:
    """dH_m(y, z)/dz = softmax(z + m_y (1 − e_y)) − e_y, for a class id and for the same one-hot target."""
    logits, margin, labels = (
        torch.randn(6, 4, dtype=torch.float64),
        torch.rand(4, dtype=torch.float64),
        torch.arange(6) % 4,
    )
    onehot = torch.eye(4, dtype=torch.float64)[labels]
    expected = (logits + margin[labels][:, None] * (1 - onehot)).softmax(1) - onehot
    for target in (labels, onehot):
        z = logits.clone().requires_grad_()
        cross_entropy(z, target, margin).sum().backward()
        torch.testing.assert_close(z.grad, expected)
