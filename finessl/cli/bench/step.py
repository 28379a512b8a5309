"""finessl bench step."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from finessl.cli.bench import bench, bench_recipe
from finessl.cli.options import Compile, Device, Fields, Json, recipe_options


@bench.command()
@recipe_options("backbone", "tuning", "method", "image_size", "batch_size", "strong_views", "precision")
def step(
    *,
    fields: Fields,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 100,
    source_size: Annotated[int, typer.Option(help="Side of the stored images, in pixels.")] = 32,
    repeats: Annotated[int, typer.Option(help="Steps to time.")] = 10,
    compile_: Compile = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also print the kernels by kind.")] = False,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Where a training step's time goes, and how far it is from the chip's limit."""
    from finessl.bench.step import bench_step
    from finessl.runtime.device import resolve_device

    recipe = bench_recipe(fields)
    result = bench_step(
        recipe,
        resolve_device(device),
        classes=classes,
        source_size=source_size,
        repeats=repeats,
        compile=compile_,
        profile=profile,
    )
    if json_:
        print(json.dumps(result.as_dict()))
        return
    about = result.as_dict()
    names = f"{recipe.tuning.name}, {recipe.method.name}"
    print(f"{recipe.model.backbone} at {about['image_size']} px, {names}: {about['images']} images per step")
    print(f"on {about['device']} in {about['precision']}\n")
    total = sum(result.parts.values())
    for name, value in result.parts.items():
        print(f"  {name:<14}{value:10.2f} ms {value / total:7.1%}")
    print(f"  {'sum':<14}{total:10.2f} ms  (each part waited for)")
    for part, group in about["kinds_ms"].items():
        print(f"\n  kernels of the {part}: {sum(group.values()):.2f} ms")
        for kind, value in group.items():
            print(f"    {kind:<24}{value:8.2f} ms")
    own = result.parts["data"] + result.parts.get("method", 0.0)
    print(f"\n  data + method are {own / total:.1%} of the step")
    print(f"  pipelined step {result.step:10.2f} ms, {about['images_per_second']:,.0f} images/s")
    print(f"  the encoder's arithmetic at this machine's matrix rate ({about['matmul_tflops']:.2f} TFLOP/s): "
          f"{result.floor:.2f} ms = {about['share_of_floor']:.0%} of the step")  # fmt: skip
    print(
        f"  peak memory {about['peak_memory_gb']:.2f} GB, first step (with compilation) {about['compile_seconds']:.1f} s"
    )
