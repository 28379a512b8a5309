"""finessl bench tuning."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from finessl.cli.bench import bench, bench_recipe
from finessl.cli.options import Compile, Device, Fields, Json, recipe_options

BASE = "vpt-deep"  # the strategy that the others are compared with


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
    import sys
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
    for row in bench_tunings(
        recipe, names, target, repeats=repeats, compile=compile_, log=lambda text: print(text, file=sys.stderr)
    ):
        rows.append(row)
        if not json_:
            print(f"{row.name:<13}{row.trained:>12,}{row.step:>12.1f}{row.step / rows[0].step:>8.2f}   "
                  f"{row.memory / 1e9:.2f} GB", flush=True)  # fmt: skip
    if json_:
        print(json.dumps([asdict(row) for row in rows]))
