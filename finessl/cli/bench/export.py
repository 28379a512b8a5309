"""finessl bench export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finessl.cli.bench import bench, print_rates
from finessl.cli.options import Json, Moved


@bench.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    batch_size: Annotated[int, typer.Option(help="Images at a time.", min=1)] = 32,
    repeats: Annotated[int, typer.Option(help="Rounds; the median counts.", min=1)] = 9,
    weights: Moved = None,
    json_: Json = False,
) -> None:
    """ONNX Runtime against finessl's own prediction on the CPU, one thread each, in images per second of CPU time."""
    import sys

    from finessl.bench.export import bench_export

    print_rates(
        bench_export(
            run, batch=batch_size, repeats=repeats, weights=weights, log=lambda text: print(text, file=sys.stderr)
        ),
        json_,
    )
