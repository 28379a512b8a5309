"""finessl bench step and tuning: training steps."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from finessl.cli.bench import bench, bench_recipe
from finessl.cli.options import Compile, Device, Fields, Json, Set, note, recipe_options

BASE = "vpt-deep"  # the strategy that the others are compared with


@bench.command()
@recipe_options("root", "backbone", "tuning", "method", "image_size", "batch_size", "strong_views", "precision")
def step(
    *,
    fields: Fields,
    data: Annotated[
        str, typer.Option(help="Data as finessl train takes it: sizes of images vary. [default: random images]")
    ] = "",
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 100,
    source_size: Annotated[int, typer.Option(help="Side of the stored images, in pixels.")] = 32,
    repeats: Annotated[int, typer.Option(help="Steps to time.")] = 10,
    compile_: Compile = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also print the kernels by kind.")] = False,
    two_sources: Annotated[
        bool | None,
        typer.Option(
            "--two-sources/--joined",
            help="Attention by Triton kernels that read keys from two tensors, or over joined keys. [default: the faster one]",
        ),
    ] = None,
    set_: Set = None,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Where a training step's time goes, and how far it is from the device's limit."""
    from finessl.bench.step import bench_step
    from finessl.recipe import parse_setting
    from finessl.runtime.device import resolve_device

    settings = dict(map(parse_setting, set_ or []))
    recipe = bench_recipe(fields, data, settings)
    result = bench_step(
        recipe,
        resolve_device(device),
        classes=classes,
        source_size=source_size,
        repeats=repeats,
        compile=compile_,
        profile=profile,
        two_sources=two_sources,
    )
    about = {"settings": settings, **result.as_dict()}
    if json_:
        print(json.dumps(about))
        return
    names = f"{recipe.tuning.name}, {recipe.method.name}"
    print(f"{recipe.model.backbone} at {about['image_size']} px, {names}: {about['images']} images per step")
    for name, value in settings.items():
        print(f"with {name} = {value}")
    print(f"on {about['device']} in {about['precision']}\n")
    total = sum(result.parts.values())
    for name, value in result.parts.items():
        print(f"  {name:<14}{value:10.2f} ms {value / total:7.1%}")
    print(f"  {'sum':<14}{total:10.2f} ms  (each part waited for)")
    for part, group in about["kinds_ms"].items():
        print(f"\n  kernels of the {part}: {sum(group.values()):.2f} ms")
        for kind, value in group.items():
            print(f"    {kind:<24}{value:8.2f} ms")
    if about["kernels_ms"]:
        print("\n  slowest kernels of the step")
        for name, value in about["kernels_ms"].items():
            print(f"    {name[:60]:<62}{value:8.2f} ms")
    own = result.parts["data"] + result.parts.get("method", 0.0)
    print(f"\n  data + method are {own / total:.1%} of the step")
    print(f"  pipelined step {result.step:10.2f} ms, {about['images_per_second']:,.0f} images/s")
    print(f"  the encoder's arithmetic at this machine's matrix rate ({about['matmul_tflops']:.2f} TFLOP/s): "
          f"{result.floor:.2f} ms = {about['share_of_floor']:.0%} of the step")  # fmt: skip
    print(
        f"  peak memory {about['peak_memory_gb']:.2f} GB, first step (with compilation) {about['compile_seconds']:.1f} s"
    )


@bench.command()
@recipe_options("backbone", "image_size", "batch_size", "strong_views")
def tuning(
    *,
    fields: Fields,
    tunings: Annotated[str, typer.Option(help="Names separated by commas, or 'all' that fit.")] = "all",
    repeats: Annotated[int, typer.Option(help="Steps to time.")] = 10,
    compile_: Compile = None,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Step time, memory and parameters of each tuning strategy, side by side; ratios against vpt-deep."""
    from dataclasses import asdict

    from finessl.bench.tuning import bench_tunings
    from finessl.recipe.catalog import registry
    from finessl.runtime.device import resolve_device
    from finessl.sweeps.compare import axis_values

    names = axis_values(tunings, registry("tunings").names(), "tunings")
    recipe = bench_recipe(fields)
    target = resolve_device(device)
    names.sort(key=lambda name: name != BASE)  # the one that the others are compared with comes first
    if not json_:
        memory = "GPU memory" if target.type == "cuda" else "peak memory (of the whole process so far)"
        batch = recipe.train.batch_size
        about = f"{batch} labeled + {batch} weak + {recipe.data.strong_views} × {batch} strong"
        print(f"{recipe.model.backbone}, {about}, on {target}\n")
        print(f"{'tuning':<13}{'trained':>12}{'ms a step':>12}{'ratio':>8}   {memory}", flush=True)
    rows = []
    for row in bench_tunings(recipe, names, target, repeats=repeats, compile=compile_, log=note):
        rows.append(row)
        if not json_:
            print(f"{row.name:<13}{row.trained:>12,}{row.step:>12.1f}{row.step / rows[0].step:>8.2f}   "
                  f"{row.memory / 1e9:.2f} GB", flush=True)  # fmt: skip
    if json_:
        print(json.dumps([asdict(row) for row in rows]))
