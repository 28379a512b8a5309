"""A run in words: how good it is, whether unlabeled images helped, and what to watch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from finessl.analysis.estimate import STRANGE, SecondOpinion
from finessl.analysis.runs import Outcome, plain
from finessl.data.dataset import count_of, some
from finessl.inference import metrics
from finessl.inference.audit import Audit
from finessl.inference.metrics import Interval

MAX_UNEVEN = 0.10  # share of the pseudo-labels in another class's share; beyond it, a warning
MAX_OVERCONFIDENCE = 0.05  # mean confidence minus accuracy; beyond it, a warning
MAX_HALF_WIDTH = 0.10  # of the 95 % interval of confidence minus accuracy; beyond it, calibration is called unknown
WEAK = 0.5  # recall of a weak class, relative to the mean recall
TEST_PART = 4  # index of the test images in a data fingerprint (`finessl.data.dataset.PARTS`, after the version)
AUDIT = (50, 100, 400)  # numbers of labels for which the report gives the precision of an audit


@dataclass(frozen=True)
class Finding:
    level: Literal["problem", "watch", "good", "note"]
    title: str
    text: str


@dataclass
class Verdict:
    """The top of the report."""

    figure: str  # "64.6 %"
    caption: str
    bounds: Interval | None  # of the gauge
    at: float | None  # mark on the gauge
    measured: bool
    sentences: list[str] = field(default_factory=list)


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def span(interval: Interval, between: str = "–") -> str:
    return f"{100 * max(interval.low, 0):.1f}{between}{100 * interval.high:.1f} %"


def points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "−")


# ---- how good -------------------------------------------------------------------------------------------------------


def verdict_of(subject: Outcome, others: Sequence[Outcome]) -> Verdict:
    if subject.test is not None:
        right, count = int(subject.test.correct.sum()), len(subject.test.correct)
        bounds = metrics.wilson(right, count)
        verdict = Verdict(
            percent(right / count), f"of {count:,} test images are classified correctly", bounds, right / count, True,
            [f"With other test images of the same kind, expect between {span(bounds, ' and ')} (95 % interval)."],
        )  # fmt: skip
        verdict.sentences.append(gain(subject, others))
        if subject.audit is not None:
            verdict.sentences.append(f"Audited: {audited(subject.audit)}.")
        return verdict
    if not subject.finished:
        steps, measured = subject.series("test", "accuracy")
        if len(measured):
            text = f"of the test images were right at step {steps[-1]:,} of {subject.recipe.train.steps:,}"
            return Verdict(percent(measured[-1]), f"{text}; the run has not finished", None, float(measured[-1]), True)
        text = f"accuracy: the run has not finished; it came to step {subject.step:,} of {subject.recipe.train.steps:,}"
        return Verdict("unknown", text, None, None, False, ["Run its command again: it resumes from its checkpoint."])
    if subject.audit is not None:
        found = subject.audit
        bounds = Interval(found["low"], found["high"])
        text = "of the unlabeled images are classified correctly (audited)"
        return Verdict(percent(found["accuracy"]), text, bounds, found["accuracy"], True, [f"{audited(found)}."])
    return ask_for_audit(subject)


def audited(audit: Audit) -> str:
    interval = span(Interval(audit["low"], audit["high"]), " to ")
    return (
        f"a person judged {audit['judged']:,} unlabeled images, chosen at random, on {audit['date']}; "
        f"{audit['right']:,} were right. Accuracy {percent(audit['accuracy'])}, 95 % interval {interval}"
    )


def gain(subject: Outcome, others: Sequence[Outcome]) -> str:
    """The gain over labeled images only. Known only if a supervised run differs in nothing but the method."""
    if subject.recipe.method.name == "supervised":
        return "It learned from the labeled images alone: this is the accuracy that unlabeled images have to beat."
    if subject.recipe.method.name == "quick":
        return (
            "It was solved on frozen features, without fine-tuning: this is the accuracy that fine-tuning has to beat."
        )
    baselines = [o for o in reversed(others) if o.recipe.method.name == "supervised"]
    if not baselines:
        return (
            "Not known yet whether the unlabeled images helped. Train once more with --method supervised and otherwise "
            "the same settings, and give both runs to finessl report."
        )
    baseline = next((o for o in baselines if not differences(subject, o)), None)
    if baseline is None:
        apart = differences(subject, baselines[0])
        return (
            f"Not known whether the unlabeled images helped: the run \u201c{baselines[0].label}\u201d differs in more than "
            f"the method: {some(apart, 8)}. Train once more with --method supervised and otherwise the same settings."
        )
    assert subject.test is not None and baseline.test is not None
    mine, theirs = subject.test.correct.astype(float), baseline.test.correct.astype(float)
    difference = float(mine.mean() - theirs.mean())
    low, high = metrics.bootstrap(lambda a, b: float(a.mean() - b.mean()), mine, theirs)
    text = f"{points(difference)} points against labeled images alone (95 % interval {points(low)} to {points(high)})"
    if low > 0:
        return f"The unlabeled images helped: {text}."
    if high < 0:
        return f"The unlabeled images did harm: {text}."
    return f"These test images cannot tell whether the unlabeled images helped: {text}."


def differences(one: Outcome, other: Outcome) -> list[str]:
    """In words, every difference between two runs except the method."""
    found = data_differences(one, other)
    if other.test is None:
        found.append("it has no results on test images")
    mine, theirs = one.meta.get("weights_sha256"), other.meta.get("weights_sha256")
    if mine and theirs and mine != theirs:
        found.append("the backbone's weights")
    for name, (here, there) in one.recipe.differences(other.recipe, places=False).items():
        if not name.startswith("method."):
            found.append(f"{name} ({plain(there)} there, {plain(here)} here)")
    return found


def data_differences(one: Outcome, other: Outcome) -> list[str]:
    """In words, the differences between the images of two runs."""
    found = []
    mine, theirs = ((o.fingerprint or "").split(":") for o in (one, other))
    if one.fingerprint and other.fingerprint and mine[:TEST_PART] != theirs[:TEST_PART]:
        found.append("other data")
    elif one.split and other.split and one.split["labeled"] != other.split["labeled"]:
        found.append("other labeled images")
    if one.classes != other.classes:
        found.append("other classes")
    elif mine[TEST_PART:] != theirs[TEST_PART:]:
        found.append("other test images")
    elif one.test is not None and other.test is not None:
        same = np.array_equal(one.test.index, other.test.index) and np.array_equal(one.test.labels, other.test.labels)
        if not same:
            found.append("other test images")
    return found


def ask_for_audit(subject: Outcome) -> Verdict:
    """The verdict without labeled test images: confidence is no measurement, so the report asks for an audit."""
    buys = ", ".join(f"{n} images give it to ±{100 * half_width(n):.0f} points" for n in AUDIT)
    return Verdict(
        "not measured", "accuracy: no test image has a label", None, None, False,
        [
            "The classifier was trained on every label there is, so nothing here can check it. Its own confidence is "
            "usually too high.",
            f"Audit it: finessl audit {subject.path} -k 100 --out audit.csv chooses unlabeled images at random. Fill in "
            f"their labels, then run finessl audit {subject.path} --answers audit.csv. Or put new labeled images into "
            f"folders, one per class: finessl evaluate {subject.path} FOLDER.",
            f"What labels buy, at worst (95 % interval): {buys}.",
        ],
    )  # fmt: skip


def half_width(images: int) -> float:
    """Half width of the 95 % interval of an accuracy of 50 %, where it is widest."""
    low, high = metrics.wilson(images / 2, images)
    return (high - low) / 2


# ---- what to watch --------------------------------------------------------------------------------------------------


def findings(subject: Outcome, opinion: SecondOpinion | None) -> list[Finding]:
    """All findings, problems first. Checks that pass are findings too."""
    found = [Finding("problem", "Not finished", subject.missing[0])] if not subject.finished else []
    found += filter(
        None,
        [
            never_named(subject), overconfident(subject), biased(subject), weak_classes(subject), outsiders(subject),
            strangers(opinion), unused(subject),
        ],
    )  # fmt: skip
    if gone := subject.missing[0 if subject.finished else 1 :]:
        found.append(Finding("note", "What is missing", " ".join(gone)))
    order = ("problem", "watch", "good", "note")
    return sorted(found, key=lambda finding: order.index(finding.level))


def never_named(subject: Outcome) -> Finding | None:
    if subject.test is not None:
        given, there, where = subject.test.predicted, subject.test.labels, "test image"
    elif subject.unlabeled is not None:
        given, there, where = subject.unlabeled["label"], np.arange(len(subject.classes)), "unlabeled image"
    else:
        return None
    never = np.setdiff1d(there, given)
    if not len(never):
        return None
    names = some([subject.classes[k] for k in never])
    plural = "class is" if len(never) == 1 else "classes are"
    return Finding("problem", f"{len(never)} {plural} never predicted", f"No {where} is called {names}.")


def overconfident(subject: Outcome) -> Finding | None:
    test = subject.test
    if test is None:
        return None
    sure, right = float(test.confidence.mean()), float(test.correct.mean())
    low, high = metrics.bootstrap(lambda c, r: float(c.mean() - r.mean()), test.confidence, test.correct.astype(float))
    text = f"It is {percent(sure, 0)} sure on average and right {percent(right, 0)} of the time"
    if sure - right > MAX_OVERCONFIDENCE and low > 0:
        kappa = metrics.rectification(test.confidence, test.correct)
        return Finding("watch", "Overconfident", f"{text}: multiply its confidence by {kappa:.2f}.")
    if right - sure > MAX_OVERCONFIDENCE and high < 0:
        return Finding("note", "Too modest", f"{text}: its answers deserve more trust than they claim.")
    if max(-low, high) > MAX_HALF_WIDTH:
        few = f"{count_of(len(test.correct), 'test image')} {'is' if len(test.correct) == 1 else 'are'} too few"
        return Finding("note", "Calibration not known", f"{text}. {few} to say whether its confidence can be trusted.")
    return Finding("good", "Confidence means what it says", f"{text}.")


def biased(subject: Outcome) -> Finding | None:
    if not subject.diagnostics:
        return None
    last, classes = subject.diagnostics[-1], subject.classes
    before = subject.diagnostics[-2]["step"] if len(subject.diagnostics) > 1 else 0
    when = (
        f"Pseudo-labels of the last {count_of(last['step'] - before, 'step')} of training, not of the final classifier:"
    )
    pseudo = np.array(last["pseudo"], float)
    share = pseudo / pseudo.sum()
    if "truth" not in last:
        most, least = int(share.argmax()), int(share.argmin())
        text = (
            f"{when} {classes[most]} got {share[most] * len(share):.1f} times an even share, {classes[least]} "
            f"{share[least] * len(share):.1f} times. That is bias only if your images are spread evenly."
        )
        return Finding("note", "Spread of the pseudo-labels", text)
    truth = np.array(last["truth"], float)
    moved = metrics.distance(pseudo, truth)
    noise = 0.5 * np.sqrt(len(truth) / truth.sum())  # the distance two samples of one distribution would have, about
    quotient = np.divide(share, truth / truth.sum(), out=np.full(len(truth), np.nan), where=truth > 0)
    most, least = int(np.nanargmax(quotient)), int(np.nanargmin(quotient))
    text = (
        f"{when} {classes[most]} got {quotient[most]:.1f} times its true share, {classes[least]} {quotient[least]:.1f} "
        f"times; {percent(moved, 0)} of them would have to move to even that out."
    )
    if moved > MAX_UNEVEN + noise:
        return Finding("watch", "Biased towards some classes", text)
    return Finding("good", "Pseudo-labels are spread as the classes are", text)


def weak_classes(subject: Outcome) -> Finding | None:
    if subject.test is None:
        return None
    recall = metrics.recalls(subject.test.confusion)
    weak = np.flatnonzero(recall < WEAK * np.nanmean(recall))
    if not len(weak):
        return None
    weak = weak[np.argsort(recall[weak])]
    names = some([f"{subject.classes[k]} ({percent(recall[k], 0)})" for k in weak])
    text = f"Less than half as often recognised as the mean class: {names}. A few more labels help most there."
    return Finding("watch", f"{len(weak)} weak {'class' if len(weak) == 1 else 'classes'}", text)


def outsiders(subject: Outcome) -> Finding | None:
    """Images of novel classes, if the data set knows them."""
    inside, outside = subject.histogram("weight", "correct", "incorrect"), subject.histogram("weight", "novel")
    if inside is None or outside is None:
        return None
    area = metrics.binned_auroc(inside, outside)
    share = outside.sum() / (inside.sum() + outside.sum())
    text = (
        f"{percent(float(share), 0)} of the unlabeled images are of classes that the classifier does not have. Their weight "
        f"tells them from the others with an AUROC of {area:.2f} (1 is perfect, 0.5 is chance)."
    )
    return Finding("watch" if area < 0.8 else "note", "Images of other classes", text)


def strangers(opinion: SecondOpinion | None) -> Finding | None:
    """Images unlike all classes, by the untuned backbone."""
    if opinion is None or opinion.strange is None:
        return None
    amount = "Under 1 %" if opinion.strange < 0.01 else percent(opinion.strange, 0)
    text = (
        f"{amount} of the unlabeled images are further from every class than {percent(1 - STRANGE, 0)} of the labeled "
        "images are"
    )
    if opinion.strange > 3 * STRANGE:
        return Finding("watch", "Some images may belong to no class", f"{text}. See the strangest of them below.")
    return Finding("good", "Few images look out of place", f"{text}.")


def unused(subject: Outcome) -> Finding | None:
    used = subject.series("train", "used")[1]
    if not len(used) or used[-1] >= 0.5:
        return None
    text = f"At the end {percent(float(used[-1]), 0)} of a batch's unlabeled images took part; it was not sure of the others."
    return Finding("watch", "Few pseudo-labels are used", text)
