"""finessl bench labeling."""

from __future__ import annotations

from typing import Annotated

import typer

from finessl.cli.bench import bench
from finessl.cli.options import Json, Weights


@bench.command(no_args_is_help=True)
def labeling(
    data: Annotated[str, typer.Argument(help="Folder or table with a label for every image.", show_default=False)],
    target: Annotated[float, typer.Option(help="Accuracy to reach, 0 to 1.", min=0, max=1)] = 0.8,
    labels: Annotated[int, typer.Option(help="Labels at most.", min=1)] = 300,
    pause: Annotated[float, typer.Option(help="Seconds that a person takes per image.", min=0)] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the order of the images.", min=0)] = 0,
    backbone: Annotated[str, typer.Option(help="Backbone of the features (finessl list backbones).")] = "embedded",
    weights: Weights = None,
    json_: Json = False,
) -> None:
    """Labels and minutes until the studio's answer is good, against labeling random images."""
    import json
    from dataclasses import asdict

    from finessl.bench.labeling import bench_labeling
    from finessl.runtime.progress import Display

    with Display() as display:
        found = bench_labeling(
            data, target=target, most=labels, pause=pause, seed=seed, backbone=backbone, weights=weights or (),
            progress=display.update,
        )  # fmt: skip
    if json_:
        print(json.dumps([asdict(row) for row in found]))
        return
    print("| order | labels | minutes | accuracy | audited |\n| --- | --- | --- | --- | --- |")
    for row in found:
        audited = row.audited
        interval = f"{audited['value']:.1%} ({audited['low']:.0%} to {audited['high']:.0%}, {audited['n']} images)"
        print(f"| {row.order} | {row.labels} | {row.minutes:.1f} | {row.accuracy:.1%} | {interval} |")
    for row in found:
        print(f"\n{row.order}: " + ", ".join(f"{labels} {accuracy:.0%}" for labels, accuracy in row.curve))
