"""finessl list, finessl doctor."""

from __future__ import annotations

from typing import Annotated

import typer

from finessl.cli import app

KINDS = ("methods", "tunings", "backbones", "datasets", "splits", "heads", "weak-views", "strong-views", "recipes")


@app.command("list")
def list_(
    kind: Annotated[str | None, typer.Argument(help=f"One of {', '.join(KINDS)}. (default: all)")] = None,
    options: Annotated[
        bool, typer.Option("--options", "-o", help="Also each one's options and their defaults.")
    ] = False,
) -> None:
    """What there is to choose from."""
    from rich.console import Console
    from rich.table import Table

    from finessl.catalog import entries
    from finessl.errors import FinesslError
    from finessl.registry import nearest

    if kind is not None and kind not in KINDS:
        raise FinesslError(f"finessl list {kind}{nearest(kind, KINDS) or '.'} Choose from {', '.join(KINDS)}.")
    console = Console()
    for one in [kind] if kind else KINDS:
        table = Table(title=one, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, summary, its_options in entries(one, options):
            table.add_row(f"[bold]{name}[/bold]", summary)
            for option in its_options:
                table.add_row("", f"[dim]{option}[/dim]")
        console.print(table, "")


@app.command()
def doctor() -> None:
    """Versions, device, memory; what is missing and how to get it."""
    from rich.console import Console
    from rich.table import Table

    from finessl.doctor import examine

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    marks = {"ok": "[green]ok[/green]", "missing": "[yellow]missing[/yellow]", "problem": "[red]problem[/red]"}
    found = examine()
    for line in found:
        table.add_row(marks[line.state], line.what, line.finding)
    Console().print(table)
    if any(line.state == "problem" for line in found):
        raise typer.Exit(1)
