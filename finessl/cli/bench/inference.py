"""finessl bench predict, export and serve: a trained classifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from finessl.cli.bench import bench, bench_recipe, print_rates
from finessl.cli.options import Compile, Device, Fields, Json, Moved, note, recipe_options


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
    """Images per second of a classifier: the encoder against the device's matrix rate, a folder against its decoding."""
    from finessl.bench.predict import bench_predict
    from finessl.runtime.device import resolve_device

    target = resolve_device(device)
    recipe = bench_recipe(fields)
    batch = batch_size or (512 if target.type == "cuda" else 64)
    rows = bench_predict(recipe, target, batch=batch, images=images, repeats=repeats, compile=compile_)
    print_rates(rows, json_)


@bench.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    batch_size: Annotated[int, typer.Option(help="Images at a time.", min=1)] = 32,
    repeats: Annotated[int, typer.Option(help="Rounds; the median counts.", min=1)] = 9,
    weights: Moved = None,
    json_: Json = False,
) -> None:
    """ONNX Runtime against finessl's own prediction on the CPU, one thread each, in images per second of CPU time."""
    from finessl.bench.export import bench_export

    rows = bench_export(run, batch=batch_size, repeats=repeats, weights=weights, log=note)
    print_rates(rows, json_)


@bench.command()
def serve(
    run: Annotated[Path, typer.Argument(help="Run directory, or an onnx export of one.", show_default=False)],
    clients: Annotated[int, typer.Option(help="Clients that send photos at the same time.", min=1, max=256)] = 16,
    requests: Annotated[int, typer.Option(help="Requests of one photo each.", min=1)] = 300,
    repeats: Annotated[int, typer.Option(help="Requests of 32 photos; the median counts.", min=1)] = 9,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """A server on this machine under load, and its overhead over bare prediction in requests of 32 photos."""
    from dataclasses import asdict

    from finessl.bench.serve import bench_serve

    found = bench_serve(run, device=device, clients=clients, requests=requests, repeats=repeats)
    if json_:
        print(json.dumps(asdict(found)))
        return
    print(
        f"{clients} clients, {found.requests:,} requests of one photo: {found.requests_per_second:.1f} requests/s, "
        f"p50 {found.p50:.0f} ms, p99 {found.p99:.0f} ms, {found.errors} errors"
    )
    cpu = "" if found.cpu_overhead is None else f", {found.cpu_overhead:+.1%} in CPU time"
    print(
        f"requests of 32 photos: {found.server:.1f} images/s, without a server {found.bare:.1f} images/s: overhead "
        f"{found.overhead:+.1%}{cpu}"
    )
