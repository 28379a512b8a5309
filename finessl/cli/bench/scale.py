"""finessl bench scale."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finessl.cli.bench import bench
from finessl.cli.options import Json

if TYPE_CHECKING:
    from finessl.bench.frozen import FeatureCost
    from finessl.bench.scale import SizeCost

PARTS = ("images", "features")


@bench.command()
def scale(
    sizes: Annotated[str, typer.Option(help="Images of each set, separated by commas.")] = "10000,100000,1000000",
    parts: Annotated[
        str, typer.Option(help="What to measure: images (index, decoding), features (quick and select after encoding).")
    ] = ",".join(PARTS),
    sample: Annotated[int, typer.Option(help="Images to decode per round.")] = 1000,
    repeats: Annotated[int, typer.Option(help="Rounds over all sizes of images, after one that warms up.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads of quick and select. [default: torch's]", min=0)] = 0,
    folder: Annotated[
        Path | None, typer.Option(help="Where to write the sets, until the end. [default: the system's]")
    ] = None,
    json_: Json = False,
) -> None:
    """Does an image cost the same in a large set as in a small one? Minutes for the default sizes."""
    from dataclasses import asdict

    from finessl.bench.frozen import bench_features
    from finessl.bench.scale import bench_scale, ratios
    from finessl.errors import FinesslError
    from finessl.runtime.progress import Display

    try:
        counts = [int(size) for size in sizes.split(",")]
    except ValueError as error:
        raise FinesslError(f"--sizes {sizes} should be numbers separated by commas, as 10000,100000.") from error
    asked = parts.split(",")
    if unknown := [part for part in asked if part not in PARTS]:
        raise FinesslError(f"--parts {unknown[0]} is unknown; known: {', '.join(PARTS)}.")
    images, features = [], []
    with Display() as display:
        if "images" in asked:
            images = bench_scale(counts, sample=sample, repeats=repeats, folder=folder, progress=display.update)
        if "features" in asked:
            features = bench_features(counts, folder=folder, threads=threads, progress=display.update)
    if json_:
        flatness = ratios(images) if images else {}
        print(
            json.dumps(
                {
                    "rows": [asdict(row) for row in images],
                    "ratios": flatness,
                    "features": [asdict(row) for row in features],
                }
            )
        )
        return
    if images:
        show_images(images, ratios(images), repeats)
    if features:
        show_features(features)


def show_images(rows: Sequence[SizeCost], flatness: dict[str, float], repeats: int) -> None:
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


def show_features(rows: Sequence[FeatureCost]) -> None:
    """× smallest: processor time per image, against the smallest set of the same command."""
    print(f"\n{'':>8}{'images':>11}{'s':>8}{'cpu s':>8}{'cpu ms/image':>14}{'× smallest':>12}{'MB':>8}{'accuracy':>10}")
    first: dict[str, FeatureCost] = {}
    for row in rows:
        ratio = row.image / first.setdefault(row.what, row).image
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.1%}"
        print(f"{row.what:>8}{row.images:>11,}{row.seconds:>8.1f}{row.cpu:>8.1f}{row.image:>14.3f}{ratio:>12.2f}"
              f"{row.memory:>8.0f}{accuracy:>10}")  # fmt: skip
