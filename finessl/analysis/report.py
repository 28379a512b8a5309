"""One page about a run, or about one run beside others: `finessl report RUN… [--open]`.

The last run is the subject. Nothing is fetched and nothing is run: styles, charts and images are inside the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from finessl.analysis.estimate import second_opinion
from finessl.analysis.findings import Finding, Verdict, findings, verdict_of
from finessl.analysis.galleries import galleries
from finessl.analysis.page import Html, el, join, page, table
from finessl.analysis.runs import Outcome, plain, read_runs
from finessl.analysis.sections import bias, classes, confidence, learning, pictures, side_by_side
from finessl.analysis.style import styled
from finessl.data.dataset import Dataset, some
from finessl.errors import FinesslError
from finessl.runtime.files import write_atomically, writing
from finessl.runtime.version import __version__

Progress = Callable[[str, int, int], None]
LEVELS = {"problem": "Problem", "watch": "Watch", "good": "OK", "note": "Note"}
LEAK_LIMIT = 20_000  # images among which a leak is looked for; more would take minutes


def write_report(
    paths: Sequence[str | Path], out: Path | None = None, *, images: bool = True, progress: Progress | None = None
) -> Path:
    """Write the page and return its path."""
    outcomes = read_runs(paths)
    single = len(outcomes) == 1
    target = out or (outcomes[0].path if single else outcomes[-1].path.parent) / "report.html"
    dataset = open_images(outcomes[-1], progress) if images else None
    with styled():
        content = build(outcomes, dataset, progress)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content.encode("utf-8", "replace"))  # a page is UTF-8, whatever names its files have
    return target


def open_images(outcome: Outcome, progress: Progress | None) -> Dataset | None:
    """The run's data, if it is still there and still the same; otherwise a word about it in `missing`."""
    from finessl.runs.inputs import open_source

    source = outcome.recipe.data.source
    try:
        dataset = open_source(outcome.recipe, progress)
    except FinesslError as error:
        outcome.missing.append(f"No images are shown: the data, {source}, cannot be opened. {error}")
        return None
    fingerprint = outcome.meta.get("data_fingerprint") or (outcome.split or {}).get("fingerprint")
    if changes := dataset.changes(fingerprint or ""):
        outcome.missing.append(f"No images are shown: {source} has changed since the run: {', '.join(changes)}.")
        return None
    return dataset


def build(outcomes: Sequence[Outcome], dataset: Dataset | None, progress: Progress | None = None) -> Html:
    *others, subject = outcomes
    opinion = second_opinion(subject)
    verdict = verdict_of(subject, others)
    found = findings(subject, opinion)
    if (leak := look_for_leaks(dataset, progress)) is not None:
        found = sorted([leak, *found], key=lambda finding: list(LEVELS).index(finding.level))
    title = f"{subject.recipe.data.source}: {subject.label}"
    return page(
        title,
        heading(subject, others),
        el("main",
            verdict_section(verdict),
            el("ul", [finding_item(f) for f in found], class_="findings"),
            side_by_side(outcomes),
            classes(outcomes),
            pictures(galleries(subject, opinion, dataset)) if dataset is not None else None,
            confidence(outcomes),
            learning(outcomes),
            bias(outcomes),
            provenance(outcomes),
        ),
        el("footer", f"Written by finessl {__version__} from {', '.join(str(o.path) for o in outcomes)}."),
    )  # fmt: skip


# ---- the top --------------------------------------------------------------------------------------------------------


def heading(subject: Outcome, others: Sequence[Outcome]) -> Html:
    recipe, meta = subject.recipe, subject.meta
    against = f", next to {', '.join(o.label for o in others)}" if others else ""
    facts = [f"{len(subject.classes):,} classes"] if subject.classes else []
    counts = {"labeled": "labeled", "unlabeled": "used without labels", "test": "test"}
    facts += [f"{meta[name]:,} {words}" for name, words in counts.items() if meta.get(name)]
    facts.append(f"{recipe.model.backbone} with {recipe.tuning.name}")
    return el(
        "header",
        el("p", "finessl report", class_="eyebrow"),
        el("h1", f"{Path(recipe.data.source).name or 'run'}: {subject.label}{against}"),
        el("p", " · ".join(facts), class_="quiet"),
    )


def verdict_section(verdict: Verdict) -> Html:
    gauge = None
    if verdict.bounds is not None:
        low, high = verdict.bounds
        marks = [el("i", style=f"left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%")]
        marks += [el("b", style=f"left:{100 * verdict.at:.1f}%")] if verdict.at is not None else []
        gauge = join(
            el("div", marks, class_="gauge"),
            el("div", el("span", "0 %"), el("span", "100 %"), class_="ends"),
        )
    kind = "figure" if verdict.measured else "figure estimated" if verdict.bounds else "figure estimated unknown"
    return el(
        "section",
        el("div", el("p", verdict.figure, class_=kind), el("p", verdict.caption, class_="caption"), gauge),
        el("div", [el("p", sentence) for sentence in verdict.sentences], class_="sentences"),
        class_="verdict",
        aria_label="Verdict",
    )


def finding_item(finding: Finding) -> Html:
    level = el("span", LEVELS[finding.level], class_="level")
    return el("li", level, el("h3", finding.title), el("p", finding.text), class_=finding.level)


def look_for_leaks(dataset: Dataset | None, progress: Progress | None) -> Finding | None:
    """Test images that training also saw, unlabeled or not."""
    if dataset is None or dataset.test is None:
        return None
    count = len(dataset.train) + len(dataset.test)
    if count > LEAK_LIMIT:
        text = f"{count:,} images were not searched for test images that are also in the training set."
        return Finding("note", "Leaks: not looked for", text)
    from finessl.data.inspection import report

    note = None if progress is None else lambda done, total: progress("looking for leaks", done, total)
    looked = report(dataset, progress=note)
    leaks = looked.leaks
    if not leaks:
        return Finding("good", "No leak", "No test image is among the training images, or nearly the same as one.")
    readable = len(dataset.test) if looked.tested is None else int(looked.tested.sum())
    text = (
        f"{len(leaks):,} of {readable:,} test images {'is' if len(leaks) == 1 else 'are'} also trained on "
        f"({some([test for test, _, _ in leaks], 3)}): accuracy is overstated."
    )
    return Finding("problem", "Test images leak into training", text)


# ---- the end -----------------------------------------------------------------------------------------------------------


def provenance(outcomes: Sequence[Outcome]) -> Html:
    blocks = []
    for outcome in outcomes:
        meta = outcome.meta
        trained = meta.get("trained_parameters")
        facts = {
            "run": outcome.path,
            "finished": "yes" if outcome.finished else f"no, at step {outcome.step:,} of {outcome.recipe.train.steps:,}",
            "device": meta.get("device"),
            "precision": meta.get("precision"),
            "trained parameters": trained and f"{trained:,} of {meta['parameters']:,}",
            "versions": ", ".join(f"{name} {value}" for name, value in meta.get("versions", {}).items()),
            "revision": meta.get("revision"),
            "data fingerprint": meta.get("data_fingerprint"),
            "split": outcome.split and f"{outcome.split['kind']}, seed {outcome.split['seed']}",
        }  # fmt: skip
        rows = [[name, plain(value)] for name, value in facts.items() if value]
        gone = [el("p", text) for text in outcome.missing]
        recipe = el("details", el("summary", "Recipe"), el("pre", outcome.recipe.toml()))
        blocks.append(el("div", el("h3", outcome.label), gone, table(None, rows, numbers=2), recipe))
    return el("section", el("h2", "Recipe and provenance"), el("div", blocks, class_="charts in-2"))
