"""finessl audit."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from finessl.cli import app
from finessl.cli.options import Device, Moved


@app.command(no_args_is_help=True)
def audit(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    count: Annotated[int, typer.Option("--count", "-k", help="Number of images to label.", min=1)] = 100,
    out: Annotated[Path | None, typer.Option(help="CSV to write: number, path, label (empty).")] = None,
    answers: Annotated[Path | None, typer.Option(help="The CSV with its label column filled in.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    weights: Moved = None,
    device: Device = "auto",
) -> None:
    """Measure accuracy without a test set: label a random sample.

    First with --out: write the images to label. Then with --answers: accuracy with its interval, and a temperature that
    makes confidence match accuracy. A label that is none of the classes counts as an error of the classifier.
    """
    from finessl.cli.select import check_target
    from finessl.data.dataset import count_of, some
    from finessl.errors import FinesslError
    from finessl.inference.audit import audit_run, sample_images
    from finessl.runtime.files import write_output
    from finessl.runtime.progress import Display

    if (out is None) == (answers is None):
        raise FinesslError("give --out FILE to choose images to judge, or --answers FILE with their labels.")
    if out is not None:
        check_target(out)
        paths, classes = sample_images(run, count, seed)
        write_output(out, [("number", "path", "label"), *((i, path, "") for i, path in enumerate(paths, 1))])
        whole = ", all that have no label" if len(paths) < count else ""
        print(f"{out}: {count_of(len(paths), 'image')} to judge{whole}. Classes: {some(classes, 20)}.")
        print(
            f"Fill in the label column, then: finessl audit {shlex.quote(str(run))} --answers {shlex.quote(str(out))}"
        )
        return
    assert answers is not None
    with Display() as display:
        predicting = partial(display.update, "predicting")
        found = audit_run(run, answers, weights=weights, device=device, progress=predicting)
    print(
        f"audited accuracy: {found['accuracy']:.1%} (95 % interval {100 * found['low']:.1f}–{100 * found['high']:.1f} %), "
        f"{found['right']:,} of {found['judged']:,} judged images right"
    )
    if "temperature" in found:
        print(f"temperature: {found['temperature']:.2f}, applied by predict from now on")
    else:
        print("temperature: unchanged; fitting one takes 30 judged images or more")
