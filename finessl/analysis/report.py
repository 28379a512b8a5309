"""One page about a run, or about a run and others to compare it with: `finessl report RUN… [--open]`.

The last run is the subject. The page is self-contained and runs nothing: styles, charts and images are inside the file.
The text is in templates/report.html.j2; jinja2 escapes every value, so no class name can break out of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from finessl.analysis import sections
from finessl.analysis.estimate import second_opinion
from finessl.analysis.findings import Finding, findings, verdict_of
from finessl.analysis.galleries import galleries
from finessl.analysis.runs import Outcome, plain, read_runs
from finessl.analysis.style import styled
from finessl.data.dataset import Dataset, some
from finessl.errors import FinesslError
from finessl.runtime.callbacks import Progress, no_progress
from finessl.runtime.files import write_output
from finessl.runtime.version import __version__

LEVELS = {"problem": "Problem", "watch": "Watch", "good": "OK", "note": "Note"}
LEAK_LIMIT = 20_000  # images among which a leak is looked for; more would take minutes


def write_report(
    paths: Sequence[str | Path], out: Path | None = None, *, images: bool = True, progress: Progress = no_progress
) -> Path:
    """Write the page and return its path.

    paths: run directories, or folders of them; the last run is the subject.   out: the file; None: report.html in the run, or
    in the folder of the runs.   images: show images of the data.
    """
    outcomes = read_runs(paths)
    single = len(outcomes) == 1
    target = out or (outcomes[0].path if single else outcomes[-1].path.parent) / "report.html"
    dataset = open_images(outcomes[-1], progress) if images else None
    with styled():
        content = build(outcomes, dataset, progress)
    write_output(target, content.encode("utf-8", "replace"))  # names may hold bytes that are not UTF-8
    return target


def open_images(outcome: Outcome, progress: Progress) -> Dataset | None:
    """The run's data, if it is still there and still the same; otherwise a word about it in `missing`."""
    from finessl.runs.inputs import open_source

    source = outcome.recipe.data.source
    try:
        dataset = open_source(outcome.recipe, progress)
    except FinesslError as error:
        outcome.missing.append(f"No images are shown: the data, {source}, cannot be opened. {error}")
        return None
    if changes := dataset.changes(outcome.fingerprint or ""):
        outcome.missing.append(f"No images are shown: {source} has changed since the run: {', '.join(changes)}.")
        return None
    return dataset


def build(outcomes: Sequence[Outcome], dataset: Dataset | None, progress: Progress = no_progress) -> str:
    """The page as text."""
    *others, subject = outcomes
    opinion = second_opinion(subject)
    found = findings(subject, opinion)
    if (leak := look_for_leaks(dataset, progress)) is not None:
        found = sorted([leak, *found], key=lambda finding: list(LEVELS).index(finding.level))
    return template().render(
        subject=subject,
        outcomes=outcomes,
        version=__version__,
        heading=heading(subject, others),
        facts=facts(subject),
        verdict=verdict_of(subject, others),
        findings=found,
        levels=LEVELS,
        runs=sections.side_by_side(outcomes),
        classes=sections.classes(outcomes),
        galleries=galleries(subject, opinion, dataset) if dataset is not None else [],
        confidence=sections.confidence(outcomes),
        temperature=sections.temperature(subject),
        learning=sections.learning(outcomes),
        bias=sections.bias(outcomes),
        provenance=[(outcome, provenance(outcome)) for outcome in outcomes],
    )


def template() -> Any:
    environment = Environment(
        loader=PackageLoader("finessl.analysis"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=unbroken,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html.j2")


def unbroken(value: Any) -> Any:
    """A number and its per cent sign stay on one line. Markup, and text that was escaped by `|e`, stays as it is."""
    return value if isinstance(value, Markup) else str(value).replace(" %", "\N{NO-BREAK SPACE}%")


def heading(subject: Outcome, others: Sequence[Outcome]) -> str:
    against = f", next to {', '.join(o.label for o in others)}" if others else ""
    return f"{Path(subject.recipe.data.source).name or 'run'}: {subject.label}{against}"


def facts(subject: Outcome) -> list[str]:
    """What the run was: classes, images, model."""
    recipe, meta = subject.recipe, subject.meta
    found = [f"{len(subject.classes):,} classes"] if subject.classes else []
    counts = {"labeled": "labeled", "unlabeled": "used without labels", "test": "test"}
    found += [f"{meta[name]:,} {words}" for name, words in counts.items() if meta.get(name)]
    return [*found, f"{recipe.model.backbone} with {recipe.tuning.name}"]


def look_for_leaks(dataset: Dataset | None, progress: Progress) -> Finding | None:
    """Test images that training also saw, unlabeled or not."""
    if dataset is None or dataset.test is None:
        return None
    count = len(dataset.train) + len(dataset.test)
    if count > LEAK_LIMIT:
        text = f"{count:,} images were not searched for test images that are also in the training set."
        return Finding("note", "Leaks: not looked for", text)
    from finessl.data.inspection import report

    looked = report(dataset, progress=partial(progress, "looking for leaks"))
    leaks = looked.leaks
    if not leaks:
        return Finding("good", "No leak", "No test image is among the training images, or nearly the same as one.")
    readable = len(dataset.test) if looked.tested is None else int(looked.tested.sum())
    text = (
        f"{len(leaks):,} of {readable:,} test images {'is' if len(leaks) == 1 else 'are'} also trained on "
        f"({some([test for test, _, _ in leaks], 3)}): accuracy is overstated."
    )
    return Finding("problem", "Test images leak into training", text)


def provenance(outcome: Outcome) -> sections.Table:
    """Where a run's figures come from."""
    meta = outcome.meta
    trained = meta.get("trained_parameters")
    known = {
        "run": outcome.path,
        "finished": "yes" if outcome.finished else f"no, at step {outcome.step:,} of {outcome.recipe.train.steps:,}",
        "device": meta.get("device"),
        "precision": meta.get("precision"),
        "trained parameters": trained and f"{trained:,} of {meta['parameters']:,}",
        "versions": ", ".join(f"{name} {value}" for name, value in meta.get("versions", {}).items()),
        "revision": meta.get("revision"),
        "data fingerprint": meta.get("data_fingerprint"),
        "split": outcome.split and f"{outcome.split['kind']}, seed {outcome.split['seed']}",
    }
    return sections.Table(None, [[name, plain(value)] for name, value in known.items() if value], numbers=2)
