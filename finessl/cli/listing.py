"""finessl list."""

from __future__ import annotations

from typing import Annotated

import typer

from finessl.cli import app
from finessl.cli.options import Plugins

KINDS = ("methods", "tunings", "backbones", "datasets", "splits", "heads", "weak-views", "strong-views", "recipes",
         "fields")  # fmt: skip


@app.command("list")
def list_(
    kind: Annotated[str | None, typer.Argument(help=f"One of {', '.join(KINDS)}. [default: all]")] = None,
    options: Annotated[
        bool, typer.Option("--options", "-o", help="Also list each one's options and their defaults.")
    ] = False,
    plugin: Plugins = None,
) -> None:
    """List methods, backbones, data sets and other choices."""
    from rich.table import Table
    from rich.text import Text

    from finessl.errors import FinesslError
    from finessl.recipe.catalog import entries
    from finessl.registry import nearest
    from finessl.runtime.terminal import console

    if kind is not None and kind not in KINDS:
        raise FinesslError(f"finessl list {kind}{nearest(kind, KINDS) or '.'} Choose from {', '.join(KINDS)}.")
    out = console()
    for one in [kind] if kind else KINDS:
        table = Table(title=one, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, summary, its_options in entries(one, options):
            table.add_row(Text(name, style="bold"), summary)
            for option in its_options:
                table.add_row("", Text(option, style="dim"))
        out.print(table, "")
