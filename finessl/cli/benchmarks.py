"""finessl bench step | augment | data | tuning."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from finessl.cli import app

bench = typer.Typer(help="Speed and memory, measured here.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command()
def step(
    backbone: Annotated[str, typer.Option(help="Alias or timm name; random weights.")] = "clip-vit-b16",
    tuning: Annotated[str, typer.Option(help="Tuning strategy.")] = "vpt-deep",
    method: Annotated[str, typer.Option(help="Method.")] = "finessl",
    image_size: Annotated[int | None, typer.Option(help="Pixels at the input.")] = None,
    batch_size: Annotated[int, typer.Option(help="Labeled images a step.")] = 32,
    strong_views: Annotated[int, typer.Option(help="Strong views per unlabeled image.")] = 2,
    classes: Annotated[int, typer.Option(help="Classes.")] = 100,
    source_size: Annotated[int, typer.Option(help="Pixels of the stored images.")] = 32,
    repeats: Annotated[int, typer.Option(help="Steps to time.")] = 10,
    precision: Annotated[str, typer.Option(help="auto, fp32, bf16.")] = "auto",
    compile_: Annotated[bool | None, typer.Option("--compile/--no-compile", help="torch.compile.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Where a training step's time goes, and how far it is from the chip's limit."""
    from finessl.bench.step import bench_step
    from finessl.recipe import Recipe
    from finessl.training.loop import resolve_device

    fields: dict[str, Any] = {
        "data.image_size": image_size, "data.strong_views": strong_views, "split.labels_per_class": 4,
        "model.backbone": backbone, "model.pretrained": backbone == "embedded", "tuning.name": tuning,
        "method.name": method, "train.batch_size": batch_size, "train.precision": precision,
    }  # fmt: skip
    recipe = Recipe.read(None, fields)
    result = bench_step(
        recipe, resolve_device(device), classes=classes, source_size=source_size, repeats=repeats, compile=compile_
    )
    if json_:
        print(json.dumps(result.as_dict()))
        return
    about = result.as_dict()
    print(f"{backbone} at {about['image_size']} px, {tuning}, {method}: {about['images']} images a step")
    print(f"on {about['device']} in {about['precision']}\n")
    total = sum(result.parts.values())
    for name, value in result.parts.items():
        print(f"  {name:<14}{value:10.2f} ms {value / total:7.1%}")
    print(f"  {'sum':<14}{total:10.2f} ms  (each part waited for)")
    own = result.parts["data"] + result.parts.get("method", 0.0)
    print(f"\n  data + method are {own / total:.1%} of the step")
    print(f"  pipelined step {result.step:10.2f} ms, {about['images_per_second']:,.0f} images/s")
    print(f"  the encoder's arithmetic at this machine's matrix rate ({about['matmul_tflops']} TFLOP/s): "
          f"{result.floor:.2f} ms = {about['share_of_floor']:.0%} of the step")  # fmt: skip
    print(
        f"  peak memory {about['peak_memory_gb']:.2f} GB, first step (with compilation) {about['compile_seconds']:.1f} s"
    )
