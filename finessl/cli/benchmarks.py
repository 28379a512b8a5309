"""finessl bench step | predict | augment | data | tuning | scale | quick."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finessl.cli import app

if TYPE_CHECKING:
    from finessl.bench.data import Rate

BASE = "vpt-deep"

bench = typer.Typer(help="Speed and memory, measured here.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command()
def step(
    backbone: Annotated[str, typer.Option(help="Alias or timm name; random weights.")] = "clip-vit-b16",
    tuning: Annotated[str, typer.Option(help="Tuning strategy.")] = "vpt-deep",
    method: Annotated[str, typer.Option(help="Method.")] = "finessl",
    image_size: Annotated[int | None, typer.Option(help="Pixels at the input.")] = None,
    batch_size: Annotated[int, typer.Option(help="Labeled images per step.")] = 32,
    strong_views: Annotated[int, typer.Option(help="Strong views per unlabeled image.")] = 2,
    classes: Annotated[int, typer.Option(help="Classes.")] = 100,
    source_size: Annotated[int, typer.Option(help="Pixels of the stored images.")] = 32,
    repeats: Annotated[int, typer.Option(help="Steps to time.")] = 10,
    precision: Annotated[str, typer.Option(help="auto, fp32, bf16, fp8.")] = "auto",
    compile_: Annotated[bool | None, typer.Option("--compile/--no-compile", help="torch.compile.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also the kernels by kind.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Where a training step's time goes, and how far it is from the chip's limit."""
    from finessl.bench.step import bench_step
    from finessl.recipe import Recipe
    from finessl.runtime.device import resolve_device

    fields: dict[str, Any] = {
        "data.image_size": image_size, "data.strong_views": strong_views, "split.labels_per_class": 4,
        "model.backbone": backbone, "model.pretrained": backbone == "embedded", "tuning.name": tuning,
        "method.name": method, "train.batch_size": batch_size, "train.precision": precision,
    }  # fmt: skip
    recipe = Recipe.read(None, fields)
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
    print(f"{backbone} at {about['image_size']} px, {tuning}, {method}: {about['images']} images per step")
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


@bench.command()
def predict(
    backbone: Annotated[str, typer.Option(help="Alias or timm name; random weights.")] = "clip-vit-b16",
    tuning: Annotated[str, typer.Option(help="Tuning strategy.")] = "vpt-deep",
    batch_size: Annotated[int | None, typer.Option(help="Images at a time. (default: 512 on a GPU, else 64)")] = None,
    images: Annotated[int, typer.Option(help="JPEGs of 500×375 in the folder; 0: no folder.")] = 2000,
    repeats: Annotated[int, typer.Option(help="Times to do each part.", min=1)] = 5,
    precision: Annotated[str, typer.Option(help="auto, fp32, bf16, fp8.")] = "auto",
    compile_: Annotated[bool | None, typer.Option("--compile/--no-compile", help="torch.compile.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Images per second of a classifier: the encoder against the chip's matrix rate, a folder against its decoding."""
    from finessl.bench.predict import bench_predict
    from finessl.recipe import Recipe
    from finessl.runtime.device import resolve_device

    target = resolve_device(device)
    recipe = Recipe.read(None, {
        "split.labels_per_class": 4, "model.backbone": backbone, "model.pretrained": backbone == "embedded",
        "tuning.name": tuning, "train.precision": precision,
    })  # fmt: skip
    batch = batch_size or (512 if target.type == "cuda" else 64)
    rows = bench_predict(recipe, target, batch=batch, images=images, repeats=repeats, compile=compile_)
    print_rates(rows, json_)


def print_rates(rows: Sequence[Rate], json_: bool) -> None:
    if json_:
        print(json.dumps([row.as_dict() for row in rows]))
        return
    print(f"{'':<20}{'images/s':>12}{'ratio':>8}   against")
    for row in rows:
        known = row.as_dict()
        against = f"{known['ratio']:>8.2f}   {row.reference}, {row.reference_rate:,.0f}" if row.reference else ""
        print(f"{row.part:<20}{row.rate:>12,.0f}{against}")


@bench.command()
def tuning(
    backbone: Annotated[str, typer.Option(help="Alias or timm name; random weights.")] = "clip-vit-b16",
    tunings: Annotated[str, typer.Option(help="Names separated by commas, or 'all' that fit.")] = "all",
    image_size: Annotated[int | None, typer.Option(help="Pixels at the input.")] = None,
    batch_size: Annotated[int, typer.Option(help="Labeled images per step.")] = 32,
    strong_views: Annotated[int, typer.Option(help="Strong views per unlabeled image.")] = 2,
    repeats: Annotated[int, typer.Option(help="Steps to time.")] = 10,
    compile_: Annotated[bool | None, typer.Option("--compile/--no-compile", help="torch.compile.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Step time, memory and parameters of each tuning strategy, side by side; ratios against vpt-deep."""
    import sys
    from dataclasses import asdict

    from finessl.bench.tuning import bench_tunings
    from finessl.recipe import Recipe
    from finessl.recipe.catalog import registry
    from finessl.runtime.device import resolve_device
    from finessl.sweeps.compare import axis_values

    names = axis_values(tunings, registry("tunings").names(), "tunings")
    recipe = Recipe.read(None, {
        "data.image_size": image_size, "data.strong_views": strong_views, "split.labels_per_class": 4,
        "model.backbone": backbone, "model.pretrained": backbone == "embedded", "train.batch_size": batch_size,
    })  # fmt: skip
    target = resolve_device(device)
    names.sort(key=lambda name: name != BASE)  # the one that the others are compared with comes first
    if not json_:
        memory = "GPU memory" if target.type == "cuda" else "peak memory (of the whole process so far)"
        print(
            f"{backbone}, {batch_size} labeled + {batch_size} weak + {strong_views} × {batch_size} strong, on {target}\n"
        )
        print(f"{'tuning':<13}{'trained':>12}{'ms a step':>12}{'ratio':>8}   {memory}", flush=True)
    rows = []
    for row in bench_tunings(
        recipe, names, target, repeats=repeats, compile=compile_, say=lambda text: print(text, file=sys.stderr)
    ):
        rows.append(row)
        if not json_:
            print(f"{row.name:<13}{row.trained:>12,}{row.step:>12.1f}{row.step / rows[0].step:>8.2f}   "
                  f"{row.memory / 1e9:.2f} GB", flush=True)  # fmt: skip
    if json_:
        print(json.dumps([asdict(row) for row in rows]))


@bench.command()
def augment(
    size: Annotated[int, typer.Option(help="Pixels of a view.")] = 224,
    source_size: Annotated[int, typer.Option(help="Pixels of the stored images.")] = 32,
    batch: Annotated[int, typer.Option(help="Views at a time.")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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
def data(
    data: Annotated[str, typer.Argument(help="Folder or table of images; 'synthetic' writes JPEGs of 500×375.")] = (
        "synthetic"
    ),
    root: Annotated[str | None, typer.Option(help="Folder containing the named data set.")] = None,
    images: Annotated[int, typer.Option(help="Maximum number of images, evenly spaced over the data.")] = 256,
    size: Annotated[int, typer.Option(help="Pixels of a view.")] = 224,
    batch_size: Annotated[int, typer.Option(help="Labeled images per step, and as many unlabeled ones.")] = 32,
    strong_views: Annotated[int, typer.Option(help="Strong views per unlabeled image.")] = 2,
    repeats: Annotated[int, typer.Option(help="Times to do each part; the median counts.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Images per second from files to views, against plain Pillow; is it the files or the network that limits?"""
    from finessl.bench.data import bench_data
    from finessl.runtime.device import resolve_device

    rows = bench_data(
        data, resolve_device(device), root=root, images=images, size=size, batch=batch_size,
        strong_views=strong_views, repeats=repeats,
    )  # fmt: skip
    print_rates(rows, json_)


@bench.command()
def scale(
    sizes: Annotated[str, typer.Option(help="Images of each set, separated by commas.")] = "10000,100000,1000000",
    sample: Annotated[int, typer.Option(help="Images to decode, in each round.")] = 1000,
    repeats: Annotated[int, typer.Option(help="Rounds over all sizes, after one that warms up.")] = 5,
    folder: Annotated[
        Path | None, typer.Option(help="Where to write the sets, until the end. (default: the system's)")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Does an image cost the same in a large set as in a small one? Minutes for the default sizes."""
    from dataclasses import asdict

    from finessl.bench.scale import bench_scale, ratios
    from finessl.errors import FinesslError
    from finessl.runtime.progress import Display

    try:
        counts = [int(size) for size in sizes.split(",")]
    except ValueError as error:
        raise FinesslError(f"--sizes {sizes} should be numbers separated by commas, as 10000,100000.") from error
    with Display() as display:
        rows = bench_scale(counts, sample=sample, repeats=repeats, folder=folder, progress=display.update)
    flatness = ratios(rows)
    if json_:
        print(json.dumps({"rows": [asdict(row) for row in rows], "ratios": flatness}))
        return
    print(f"medians of {repeats} rounds; cpu: processor time\n")
    print(
        f"{'':>12}{'index':>10}{'reopen':>10}{'index µs/image':>22}{'memory':>10}{'decode ms/image':>22}{'fetch 128':>11}"
    )
    print(f"{'images':>12}{'s':>10}{'s':>10}{'clock':>12}{'cpu':>10}{'MB':>10}{'clock':>12}{'cpu':>10}{'ms':>11}")
    for row in rows:
        print(f"{row.images:>12,}{row.index:>10.3f}{row.reopen:>10.3f}{row.image:>12.2f}{row.image_cpu:>10.2f}"
              f"{row.memory:>10.1f}{row.decode:>12.2f}{row.decode_cpu:>10.2f}{row.fetch:>11.2f}")  # fmt: skip
    print(f"{'largest / smallest':>32}{flatness['image']:>12.2f}{flatness['image_cpu']:>10.2f}"
          f"{'':>10}{flatness['decode']:>12.2f}{flatness['decode_cpu']:>10.2f}")  # fmt: skip


@bench.command("quick")
def quick_(
    data: Annotated[str, typer.Argument(help="Data with a label for every image, and test images.")],
    root: Annotated[str | None, typer.Option(help="Folder containing the named data set.")] = None,
    labels: Annotated[str, typer.Option(help="Labels per class, with commas.")] = "1,2,4",
    seeds: Annotated[int, typer.Option(help="Seeds per figure.", min=1)] = 3,
    select: Annotated[str, typer.Option(help="Strategies of finessl select, with commas; none.")] = "herding,random",
    backbone: Annotated[str, typer.Option(help="Backbones, with commas; auto: those that are here.")] = "auto",
    weights: Annotated[list[str] | None, typer.Option(help="A backbone's weights file, NAME=FILE; repeatable.")] = None,
    precision: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
) -> None:
    """Test accuracy of frozen features by solver, and of selected labels, as Markdown tables."""
    from statistics import mean, stdev

    from finessl.bench.quick import measure
    from finessl.cli.quick import named_files
    from finessl.data.sources import open_dataset
    from finessl.models.backbones import candidate_backbones
    from finessl.runtime.device import resolve_device
    from finessl.runtime.precision import resolve_precision
    from finessl.runtime.progress import Display

    target = resolve_device(device)
    counts = [int(part) for part in labels.split(",")]
    strategies: list[Any] = [] if select == "none" else select.split(",")
    for name, file in candidate_backbones(backbone, named_files(weights or [])):
        with Display() as display:
            rows = measure(
                open_dataset(data, root=root),
                name,
                file,
                labels=counts,
                seeds=seeds,
                strategies=strategies,
                device=target,
                precision=resolve_precision(precision, target),
                progress=display.update,
            )
        print(f"\n| {name} | " + " | ".join(f"{count} per class" for count in counts) + " | seconds |")
        print("| --- " * (len(counts) + 2) + "|")
        for what in dict.fromkeys(row.what for row in rows):
            own = {row.labels: row for row in rows if row.what == what}
            cells = []
            for count in counts:
                values = [100 * value for value in own[count].accuracy] if count in own else []
                spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
                cells.append(f"{mean(values):.1f}{spread}" if values else "")
            seconds = [value for row in own.values() for value in row.seconds]
            print(f"| {what} | {' | '.join(cells)} | {f'{mean(seconds):.2f}' if seconds else ''} |")
