"""finessl bench augment and data: from files to views."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from finessl.cli.bench import bench, bench_recipe, print_rates
from finessl.cli.options import Compile, Device, Fields, Json, recipe_options


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


@bench.command()
@recipe_options(
    "root", "path_column", "label_column", "batch_size", "strong_views", "backbone", "tuning", "method", "precision"
)
def data(
    *,
    data: Annotated[str, typer.Argument(help="Folder or table of images; 'synthetic' writes JPEGs of 500×375.")] = (
        "synthetic"
    ),
    fields: Fields,
    images: Annotated[int, typer.Option(help="Maximum number of images, evenly spaced over the data.")] = 256,
    size: Annotated[int, typer.Option(help="Side of a view, in pixels.")] = 224,
    step: Annotated[
        bool,
        typer.Option(
            "--step", help="Compare training steps on written JPEGs of one size and of many, in device and host memory."
        ),
    ] = False,
    repeats: Annotated[int, typer.Option(help="Repetitions of each part; the median counts.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps per repetition of --step.", min=1)] = 60,
    compile_: Compile = None,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Images per second from files to views, against plain Pillow; is it the files or the network that limits?"""
    from finessl.bench.data import bench_data
    from finessl.runtime.device import resolve_device

    if step:
        compare_steps(data, {**fields, "image_size": size}, images, repeats, steps, compile_, device, json_)
        return
    recipe = bench_recipe(fields)
    rows = bench_data(
        data, resolve_device(device), root=recipe.data.root, options=recipe.source.options, images=images, size=size,
        repeats=repeats, batch=recipe.train.batch_size, strong_views=recipe.data.strong_views,
    )  # fmt: skip
    print_rates(rows, json_)


def compare_steps(
    data: str,
    fields: dict[str, Any],
    images: int,
    rounds: int,
    steps: int,
    compile: bool | None,
    device: str,
    json_: bool,
) -> None:
    """`--step`."""
    from finessl.bench.photos import bench_photos
    from finessl.errors import FinesslError
    from finessl.runtime.device import resolve_device
    from finessl.runtime.progress import Display

    if data != "synthetic":
        raise FinesslError(
            f"bench data --step writes its own JPEGs; `finessl bench step --data {data}` times steps on yours."
        )
    recipe = bench_recipe(fields)
    with Display() as display:
        result = bench_photos(
            recipe, resolve_device(device), images=images, repeats=steps, rounds=rounds, compile=compile,
            progress=display.update,
        )  # fmt: skip
    about = result.as_dict()
    if json_:
        print(json.dumps(about))
        return
    names = f"{about['tuning']}, {about['method']}, {about['precision']}"
    print(f"{about['backbone']} at {about['image_size']} px, {names}, on {about['device']}")
    print(f"{about['images']:,} JPEGs of {about['sizes']} sizes, {about['decoded_gb']:.1f} GB decoded")
    print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in about["seconds"].items()) + "\n")
    print(f"{'images of':<30}{'ms a step':>10}{'ratio':>8}   rounds")
    for name, value in result.steps.items():
        measured = ", ".join(f"{each:.2f}" for each in result.rounds[name])
        print(f"{name:<30}{value:>10.2f}{about['ratio'][name]:>8.3f}   {measured}")
