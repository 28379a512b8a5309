"""finessl bench quick."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from finessl.cli.bench import bench
from finessl.cli.options import Device, Fields, Weights, recipe_options


@bench.command("quick", no_args_is_help=True)
@recipe_options("root", "path_column", "label_column", "precision")
def quick_(
    *,
    data: Annotated[str, typer.Argument(help="Data with a label for every image, and test images.")],
    fields: Fields,
    labels: Annotated[str, typer.Option(help="Labels per class, separated by commas.")] = "1,2,4",
    seeds: Annotated[int, typer.Option(help="Seeds per figure.", min=1)] = 3,
    select: Annotated[
        str, typer.Option(help="Strategies of finessl select, separated by commas, or none.")
    ] = "herding,random",
    backbone: Annotated[str, typer.Option(help="Backbones, separated by commas; auto: those that are here.")] = "auto",
    weights: Weights = None,
    device: Device = "auto",
) -> None:
    """Test accuracy of frozen features by solver, and of selected labels, as Markdown tables."""
    from statistics import mean, stdev

    from finessl.api import make_recipe
    from finessl.bench.quick import measure
    from finessl.cli.quick import named_files
    from finessl.data.sources import open_dataset
    from finessl.models.backbones import candidate_backbones
    from finessl.runtime.device import resolve_device
    from finessl.runtime.precision import resolve_precision
    from finessl.runtime.progress import Display

    recipe, target = make_recipe(None, fields, check=False), resolve_device(device)
    counts = [int(part) for part in labels.split(",")]
    strategies: list[Any] = [] if select == "none" else select.split(",")
    for name, file in candidate_backbones(backbone, named_files(weights or [])):
        with Display() as display:
            rows = measure(
                open_dataset(data, root=recipe.data.root, **recipe.source.options),
                name,
                file,
                labels=counts,
                seeds=seeds,
                strategies=strategies,
                device=target,
                precision=resolve_precision(recipe.train.precision, target),
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
