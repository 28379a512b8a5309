"""finessl bench jobs: several runs at the same time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from finessl.cli.bench import bench
from finessl.cli.options import Data, Json, Texts


@bench.command(no_args_is_help=True)
def jobs(
    *,
    data: Data,
    options: Annotated[
        Texts, typer.Argument(help="Options of finessl compare, after --. [default: --methods finessl]")
    ] = None,
    runs: Annotated[int, typer.Option(help="Runs, which differ in their seed.", min=2)] = 3,
    keep: Annotated[
        Path | None, typer.Option(help="New folder for the runs and caches. [default: a temporary one]")
    ] = None,
    json_: Json = False,
) -> None:
    """Wall time of runs one after another and at the same time, and the ratio; by NVIDIA MPS too where it is installed.

    finessl bench jobs cifar100 -- --root DATA -n 4 --methods finessl --steps 500
    """
    import tempfile
    from dataclasses import asdict

    from finessl.bench.jobs import IN_TURN, bench_jobs
    from finessl.errors import FinesslError

    if keep is not None and keep.exists():
        raise FinesslError(f"--keep {keep} exists; name a new folder.")
    rows, ratios = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        for row in bench_jobs(data, options or ["--methods", "finessl"], runs, keep or Path(temporary)):
            rows.append(row)
            turns = [one.seconds for one in rows if one.name == IN_TURN]
            if turns:
                ratios[row.name] = turns[0] / row.seconds
            if json_:
                continue
            if len(rows) == 1:
                print(f"{f'{runs} runs':<28}{'seconds':>9}{'ratio':>8}   of a run")
            ratio = f"{ratios[row.name]:>8.2f}" if turns else f"{'':>8}"
            phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.phases.items())
            print(f"{row.name:<28}{row.seconds:>9.1f}{ratio}   {phases}", flush=True)
            for message in row.messages:
                print(f"  {message}", flush=True)
    if json_:
        print(json.dumps({"runs": runs, "ways": [asdict(row) for row in rows], "ratio": ratios}))
