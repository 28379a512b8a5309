"""finessl bench scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from finessl.cli.bench import bench
from finessl.cli.options import Json


@bench.command()
def scale(
    sizes: Annotated[str, typer.Option(help="Images of each set, separated by commas.")] = "10000,100000,1000000",
    sample: Annotated[int, typer.Option(help="Images to decode per round.")] = 1000,
    repeats: Annotated[int, typer.Option(help="Rounds over all sizes, after one that warms up.")] = 5,
    folder: Annotated[
        Path | None, typer.Option(help="Where to write the sets, until the end. [default: the system's]")
    ] = None,
    json_: Json = False,
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
