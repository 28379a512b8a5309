"""finessl bench predict."""

from __future__ import annotations

from typing import Annotated

import typer

from finessl.cli.bench import bench, bench_recipe, print_rates
from finessl.cli.options import Compile, Device, Fields, Json, recipe_options


@bench.command()
@recipe_options("backbone", "tuning", "precision")
def predict(
    *,
    fields: Fields,
    batch_size: Annotated[
        int | None, typer.Option(help="Images per batch. [default: 512 on a GPU, 64 on a CPU]")
    ] = None,
    images: Annotated[int, typer.Option(help="JPEGs of 500×375 in the folder; 0: no folder.")] = 2000,
    repeats: Annotated[int, typer.Option(help="Repetitions of each part.", min=1)] = 5,
    compile_: Compile = None,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Images per second of a classifier: the encoder against the chip's matrix rate, a folder against its decoding."""
    from finessl.bench.predict import bench_predict
    from finessl.runtime.device import resolve_device

    target = resolve_device(device)
    recipe = bench_recipe(fields)
    batch = batch_size or (512 if target.type == "cuda" else 64)
    rows = bench_predict(recipe, target, batch=batch, images=images, repeats=repeats, compile=compile_)
    print_rates(rows, json_)
