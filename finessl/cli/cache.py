"""finessl cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finessl.cli import app

cache = typer.Typer(help="Show or clear the cache: decoded images, features, lists of images.", rich_markup_mode=None)
app.add_typer(cache, name="cache")
Folder = Annotated[Path | None, typer.Option(help="Folder of decoded images, as in train --cache-dir.")]


@cache.callback(invoke_without_command=True)
def show(context: typer.Context, cache_dir: Folder = None) -> None:
    """Show what is kept, where, its size and when it was last used. finessl cache clear removes it."""
    if context.invoked_subcommand is not None:
        return
    from rich.filesize import decimal
    from rich.table import Table

    from finessl.data.cache import age, cache_folder, entries, limit_bytes, pixel_folder
    from finessl.runtime.terminal import console

    found, out = entries(cache_dir), console(soft_wrap=True)
    if found:
        table = Table()
        for name in ("what", "size", "last used"):
            table.add_column(name, justify="right" if name == "size" else "left")
        for entry in found:
            table.add_row(f"{entry.what}\n{entry.path}", decimal(entry.size), f"{age(entry.used)} ago")
        table.add_section()
        table.add_row("all", decimal(sum(entry.size for entry in found)), "")
        console().print(table)
    else:
        out.print("nothing is kept.")
    out.print(f"lists of images: {cache_folder()}   (FINESSL_CACHE)")
    out.print(f"decoded images: {pixel_folder(cache_dir)}   (FINESSL_CACHE, or --cache-dir)")
    out.print(f"limit for decoded images: {limit_bytes() / 1e9:,.0f} GB   (FINESSL_CACHE_GB)")


@cache.command("clear")
def clear_(cache_dir: Folder = None) -> None:
    """Remove everything that is kept. Runs are not touched."""
    from rich.filesize import decimal

    from finessl.data.cache import clear

    removed, kept = clear(cache_dir)
    print(f"removed {decimal(sum(entry.size for entry in removed))}")
    for entry in kept:
        print(f"in use or not removable: {entry.path}")
