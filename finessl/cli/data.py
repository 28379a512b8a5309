"""finessl split, finessl inspect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from finessl.cli import app
from finessl.cli.train import DATA_HELP, LABEL_COLUMN_HELP, PATH_COLUMN_HELP


@app.command(no_args_is_help=True)
def split(
    data: Annotated[str, typer.Argument(help=DATA_HELP, show_default=False)],
    kind: Annotated[str, typer.Option(help="How labels are chosen (finessl list splits --options).")] = "auto",
    root: Annotated[str | None, typer.Option(help="Folder containing the named data set.")] = None,
    path_column: Annotated[str | None, typer.Option(help=PATH_COLUMN_HELP)] = None,
    label_column: Annotated[str | None, typer.Option(help=LABEL_COLUMN_HELP)] = None,
    labels_per_class: Annotated[
        int | None, typer.Option("--labels-per-class", "-n", help="Labels kept in each class.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Options of the split or source: --set split.ratio=20 --set source.download=true"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which images are labeled.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the split: finessl train … --split FILE.json")] = None,
    picture: Annotated[Path | None, typer.Option(help="Picture of the class counts. (default: next to --out)")] = None,
    labeled_in_unlabeled: Annotated[
        bool, typer.Option(help="Are labeled images also among the unlabeled ones?")
    ] = True,
) -> None:
    """Show or save which images are labeled."""
    import shlex

    from finessl.analysis.split_figure import draw_split
    from finessl.api import make_recipe
    from finessl.recipe import parse_setting
    from finessl.runs.inputs import make_or_load_split, open_source
    from finessl.runtime.files import writing
    from finessl.runtime.progress import Display

    more: dict[str, Any] = dict(map(parse_setting, set_ or []))
    recipe = make_recipe(
        None,
        dict(
            root=root,
            split=kind,
            labels_per_class=labels_per_class,
            seed=seed,
            path_column=path_column,
            label_column=label_column,
        ),
        {"data.source": data, "data.labeled_in_unlabeled": labeled_in_unlabeled, **more},
    )
    with Display() as display:
        dataset = open_source(recipe, display.update)
    made = make_or_load_split(recipe, dataset, None, False)
    show_split(made, dataset)
    if out is not None:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            made.save(out)
        print(f"split: {out}   (finessl train {shlex.quote(data)} --split {shlex.quote(str(out))})")
    target = picture or (out.with_suffix(".png") if out is not None else None)
    if target is not None:
        with writing(target):
            draw_split(made, dataset, target)
        print(f"picture: {target}")


def show_split(made: Any, dataset: Any) -> None:
    from rich.table import Table

    from finessl.runtime.terminal import console

    labeled, unlabeled, other = made.counts(dataset)
    positions, test_labels = made.test(dataset)
    tested = [int((test_labels == k).sum()) for k in range(len(made.classes))]
    settings = ", ".join(f"{name} {value}" for name, value in made.settings.items() if value is not None)
    table = Table(title=f"{dataset.name}: {made.kind}, seed {made.seed} ({settings})", title_justify="left")
    table.add_column("class")
    for name in ("labeled", "unlabeled", "test"):
        table.add_column(name, justify="right")
    shown = (
        range(len(made.classes))
        if len(made.classes) <= 30
        else [*range(12), None, *range(len(made.classes) - 12, len(made.classes))]
    )
    for k in shown:
        row = ("…",) * 4 if k is None else (made.classes[k], f"{labeled[k]:,}", f"{unlabeled[k]:,}", f"{tested[k]:,}")
        table.add_row(*row)
    if other:
        table.add_row("(none of them, or unknown)", "", f"{other:,}", "")
    table.add_section()
    table.add_row("all", f"{labeled.sum():,}", f"{len(made.unlabeled):,}", f"{len(positions):,}")
    console().print(table)


@app.command("inspect", no_args_is_help=True)
def inspect_(
    data: Annotated[str, typer.Argument(help=DATA_HELP, show_default=False)],
    root: Annotated[str | None, typer.Option(help="Folder containing the named data set.")] = None,
    path_column: Annotated[str | None, typer.Option(help=PATH_COLUMN_HELP)] = None,
    label_column: Annotated[str | None, typer.Option(help=LABEL_COLUMN_HELP)] = None,
    backbone: Annotated[
        str | None, typer.Option(help="Also look for suspicious labels, with this backbone's features (try: embedded).")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="The backbone's weights.")] = None,
    device: Annotated[str, typer.Option(help="For the backbone: auto, cpu, cuda …")] = "auto",
    most: Annotated[int, typer.Option(help="Show up to N examples per finding.", min=1)] = 5,
) -> None:
    """Check data before training.

    Finds broken files, duplicates, leaks between training and test images, suspicious labels and classes with too few
    labels.
    """
    from finessl.data.inspection import report
    from finessl.data.sources import open_dataset
    from finessl.runtime.progress import Display

    with Display() as display:
        columns: dict[str, Any] = {"path_column": path_column, "label_column": label_column}
        dataset = open_dataset(data, root=root, **{name: value for name, value in columns.items() if value is not None})
        features = None
        if backbone is not None:
            from finessl.inference.probe import features_of
            from finessl.runtime.device import resolve_device

            features = features_of(dataset, backbone, weights, resolve_device(device), display.update)
        found = report(dataset, features=features, progress=lambda d, t: display.update("looking", d, t or d))
    show_report(found, most)


def span(counts: Any) -> str:
    """ "4", or "4 to 12"."""
    low, high = int(counts.min()), int(counts.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def show_report(found: Any, most: int) -> None:
    from finessl.data.dataset import count_of
    from finessl.runtime.terminal import console

    out = console(soft_wrap=True)  # a file name is not broken in two
    say = lambda text="": out.print(text)  # noqa: E731
    size = lambda pair: f"{pair[1]}×{pair[0]}"  # noqa: E731
    labeled, tested = found.labeled, found.tested
    broken = lambda count: f", {count:,} broken" if count else ""  # noqa: E731
    say(
        f"{found.name}: {len(found.classes)} classes, {int(labeled.sum()):,} labeled and {found.unlabeled:,} unlabeled "
        f"training images{broken(len(found.broken) - found.broken_test)}"
    )
    say(f"  labels per class: {span(labeled)}")
    if tested is not None:
        say(f"  test images: {int(tested.sum()):,}, {span(tested)} per class{broken(found.broken_test)}")
    if found.smallest == found.largest:
        say(f"  pixels: all {size(found.smallest)}")
    else:
        say(f"  pixels: {size(found.smallest)} to {size(found.largest)}, median {size(found.median)}")
    for note in found.notes:
        say(f"  {note}")
    for one, many, items in (
        ("image cannot be read", "images cannot be read", [f"{key}: {reason}" for key, reason in found.broken]),
        (
            "group of identical training images",
            "groups of identical training images",
            [" = ".join(group) for group in found.duplicates],
        ),
        (
            "group of nearly identical training images",
            "groups of nearly identical training images",
            [" ≈ ".join(group) for group in found.near],
        ),
        (
            "test image that is also in the training set",
            "test images that are also in the training set",
            [f"{t} {'=' if how == 'same' else '≈'} {i}" for t, i, how in found.leaks],
        ),
        (
            "group of identical or nearly identical images with different labels",
            "groups of identical or nearly identical images with different labels",
            [", ".join(f"{key} ({name})" for key, name in group) for group in found.conflicts],
        ),
        (
            "suspicious label",
            "suspicious labels",
            [f"{s.key}: labeled {s.label}, looks like {s.looks_like}" for s in found.suspects],
        ),
    ):
        if items:
            say(f"\n{count_of(len(items), one, many)}")
            for item in items[:most]:
                say(f"  {item}")
            if len(items) > most:
                say(f"  … and {len(items) - most:,} more (--most {len(items)})")
    if found.advice:
        say("\nadvice")
    for line in found.advice:
        say(f"  {line}")
