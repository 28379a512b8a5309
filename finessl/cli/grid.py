"""Options and messages that finessl compare and finessl paper share."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from finessl.cli.options import Text

Format = Annotated[str, typer.Option("--format", help="Output: table, markdown, csv, json or latex.")]
Jobs = Annotated[int, typer.Option(help="Cells trained at the same time on this machine.", min=1)]
Retries = Annotated[int, typer.Option(help="Retries per failed cell, from its checkpoint.", min=0)]
Engine = Annotated[
    str, typer.Option(help="Where cells run: local, ray (a cluster), or print (one command per cell, for your queue).")
]
Address = Annotated[Text, typer.Option(help="Address of a running Ray cluster, or auto. [default: start one here]")]
Cpus = Annotated[float, typer.Option(help="CPUs per cell (ray).")]
Gpus = Annotated[
    float | None, typer.Option(help="GPUs per cell, or a fraction of one (ray). [default: 1 if available]")
]


def report(failed: dict[str, str], cells: int) -> None:
    from finessl.errors import FinesslError

    if failed:
        raise FinesslError(
            f"{len(failed)} of {cells} cells failed ({'; '.join(f'{name}: {why}' for name, why in failed.items())}). "
            "The same command tries them again."
        )


def note(message: str) -> None:
    """Aside from the table, which may go to a file."""
    print(message, file=sys.stderr)
