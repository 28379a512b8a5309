"""finessl bench augment."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from finessl.cli.bench import bench
from finessl.cli.options import Device, Json


@bench.command()
def augment(
    size: Annotated[int, typer.Option(help="Side of a view, in pixels.")] = 224,
    source_size: Annotated[int, typer.Option(help="Side of the stored images, in pixels.")] = 32,
    batch: Annotated[int, typer.Option(help="Views per batch.")] = 64,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Milliseconds per view, against Pillow transforms in the main process."""
    from dataclasses import asdict

    from finessl.bench.augment import bench_augment
    from finessl.runtime.device import resolve_device

    rows = bench_augment(resolve_device(device), size=size, source_size=source_size, batch=batch)
    if json_:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(f"{size}-px views of {source_size}-px images, {batch} at a time\n")
    print(f"{'view':<10}{'ours':>10}{'Pillow':>10}{'ratio':>8}   (ms per view)")
    for row in rows:
        print(f"{row.view:<10}{row.ours:>10.3f}{row.pillow:>10.3f}{row.ratio:>8.1f}")
