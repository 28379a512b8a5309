"""Options and messages that finessl compare and finessl paper share."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from finessl.cli.options import Device, Text, option_group

Format = Annotated[str, typer.Option("--format", help="Output: table, markdown, csv, json or latex.")]
Engine = Annotated[
    str, typer.Option(help="Where cells run: local, ray (a cluster), or print (one command per cell, for your queue).")
]


def cells_are_run(
    *,
    jobs: Annotated[int, typer.Option(help="Cells trained at the same time on this machine.", min=1)] = 1,
    device: Device = "auto",
    mps: Annotated[
        bool, typer.Option("--mps/--no-mps", help="Jobs on one GPU share it by NVIDIA MPS, where that works (local).")
    ] = True,
    retries: Annotated[int, typer.Option(help="Retries per failed cell, from its checkpoint.", min=0)] = 1,
    engine: Engine = "local",
    address: Annotated[
        Text, typer.Option(help="Address of a running Ray cluster, or auto. [default: start one here]")
    ] = None,
    cpus: Annotated[float, typer.Option(help="CPUs per cell (ray).")] = 1,
    gpus: Annotated[
        float | None, typer.Option(help="GPUs per cell, or a fraction of one (ray). [default: 1 if available]")
    ] = None,
) -> None:
    """The options of `sweeps.engines.run_cells`, for `engine_options`."""


# Options that say where and how cells are run, as the parameter `how: dict`.
engine_options = option_group("how", lambda: list(inspect.signature(cells_are_run, eval_str=True).parameters.values()))


def report(failed: dict[str, str], cells: int) -> None:
    from finessl.errors import FinesslError

    if failed:
        raise FinesslError(
            f"{len(failed)} of {cells} cells failed ({'; '.join(f'{name}: {why}' for name, why in failed.items())}). "
            "The same command tries them again."
        )
