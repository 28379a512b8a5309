"""finessl inspect."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from finessl.cli import app
from finessl.cli.options import Data, Device, Fields, Text, recipe_options


@app.command("inspect", no_args_is_help=True)
@recipe_options("root", "labels", "path_column", "label_column", "weights")
def inspect_(
    *,
    data: Data,
    fields: Fields,
    backbone: Annotated[
        Text,
        typer.Option(help="Backbone whose features show suspicious labels (try: embedded). [default: do not look]"),
    ] = None,
    device: Device = "auto",
    most: Annotated[int, typer.Option(help="Examples per finding.", min=1)] = 5,
) -> None:
    """Check data before training.

    Finds broken files, duplicates, leaks between training and test images, suspicious labels and classes with too few
    labels.
    """
    from finessl.data.inspection import Suspect, report
    from finessl.data.sources import open_dataset
    from finessl.runtime.progress import Display

    weights = fields.pop("weights", None)
    with Display() as display:
        dataset = open_dataset(data, **fields)
        suspects: list[Suspect] = []
        if backbone is not None:
            from finessl.frozen.features import FrozenEncoder, encode_part
            from finessl.frozen.suspects import find_suspects
            from finessl.models.backbones import create_backbone
            from finessl.runtime.device import resolve_device

            encoder = FrozenEncoder(create_backbone(backbone, weights=weights), resolve_device(device))
            suspects = find_suspects(dataset, encode_part(dataset, "train", encoder, display.update).rows)
        found = report(dataset, suspects=suspects, progress=lambda d, t: display.update("looking", d, t or d))
    show_report(found, most)


def span(counts: Any) -> str:
    """ "4", or "4 to 12"."""
    low, high = int(counts.min()), int(counts.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def show_report(found: Any, most: int) -> None:
    from finessl.data.dataset import worded
    from finessl.runtime.terminal import console

    out = console(soft_wrap=True)  # a file name is not broken in two
    size = lambda pair: f"{pair[1]}×{pair[0]}"  # noqa: E731
    labeled, tested = found.labeled, found.tested
    broken = lambda count: f", {count:,} broken" if count else ""  # noqa: E731
    out.print(
        f"{found.name}: {len(found.classes)} classes, {int(labeled.sum()):,} labeled and {found.unlabeled:,} unlabeled "
        f"training images{broken(len(found.broken) - found.broken_test)}"
    )
    out.print(f"  labels per class: {span(labeled)}")
    if tested is not None:
        out.print(f"  test images: {int(tested.sum()):,}, {span(tested)} per class{broken(found.broken_test)}")
    if found.smallest == found.largest:
        out.print(f"  pixels: all {size(found.smallest)}")
    else:
        out.print(f"  pixels: {size(found.smallest)} to {size(found.largest)}, median {size(found.median)}")
    for note in found.notes:
        out.print(f"  {note}")
    titles = {
        "image{s} cannot be read": [f"{key}: {reason}" for key, reason in found.broken],
        "group{s} of identical training images": [" = ".join(group) for group in found.duplicates],
        "group{s} of nearly identical training images": [" ≈ ".join(group) for group in found.near],
        "test image{s} that {are} also in the training set": [
            f"{t} {'=' if how == 'same' else '≈'} {i}" for t, i, how in found.leaks
        ],
        "group{s} of identical or nearly identical images with different labels": [
            ", ".join(f"{key} ({name})" for key, name in group) for group in found.conflicts
        ],
        "suspicious label{s}": [f"{s.key}: labeled {s.label}, looks like {s.looks_like}" for s in found.suspects],
    }
    for title, items in titles.items():
        if items:
            out.print("\n" + worded(len(items), "{n} " + title))
            for item in items[:most]:
                out.print(f"  {item}")
            if len(items) > most:
                out.print(f"  … and {len(items) - most:,} more (--most {len(items)})")
    if found.advice:
        out.print("\nadvice")
    for line in found.advice:
        out.print(f"  {line}")
