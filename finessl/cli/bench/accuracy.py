"""finessl bench accuracy: time to accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from finessl.cli.bench import bench
from finessl.cli.options import Data, Json, Texts


@bench.command(no_args_is_help=True)
def accuracy(
    *,
    data: Data,
    options: Annotated[Texts, typer.Argument(help="Options of finessl train, after --.", show_default=False)] = None,
    target: Annotated[float, typer.Option(help="Accuracy to reach, in %.", min=0, max=100)] = 80.44,
    seeds: Annotated[int, typer.Option(help="Runs, one after the other; the first is cold.", min=1)] = 3,
    reference: Annotated[
        float | None, typer.Option(help="Wall time to compare with, in seconds. [default: none]", min=0.001)
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="New folder for the runs and caches. [default: a temporary one]")
    ] = None,
    json_: Json = False,
) -> None:
    """Time to accuracy: seconds of finessl train from command to exit, by phase, cold and warm.

    finessl bench accuracy cifar100 --reference 1153 -- --root DATA -n 4 --recipe adaptformer --steps 5000
    """
    import tempfile
    from dataclasses import asdict
    from statistics import mean, stdev

    from finessl.bench.accuracy import time_to_accuracy
    from finessl.errors import FinesslError

    if keep is not None and keep.exists():
        raise FinesslError(f"--keep {keep} exists; name a new folder, so that the first run is cold.")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for row in time_to_accuracy(data, options or [], seeds, keep or Path(temporary)):
            rows.append(row)
            if json_:
                continue
            if len(rows) == 1:
                print(f"{'seed':>4}  {'caches':<6}{'accuracy':>10}{'seconds':>9}   of which")
            phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.phases.items())
            print(
                f"{row.seed:>4}  {'cold' if row.cold else 'warm':<6}{row.accuracy:>9.2f}%{row.seconds:>9.1f}   {phases}",
                flush=True,
            )
    if json_:
        print(json.dumps({"target": target, "runs": [asdict(row) for row in rows]}))
        return
    figures = [row.accuracy for row in rows]
    spread = f" ± {stdev(figures):.2f}" if seeds > 1 else ""
    reached = "reached" if mean(figures) >= target else "not reached"
    print(f"\nmean accuracy {mean(figures):.2f}{spread} %: the target of {target:g} % is {reached}")
    if reference:
        ratios = ", ".join(f"{reference / row.seconds:.1f}" for row in rows)
        print(f"{reference:,.0f} s are {ratios} times as long")
