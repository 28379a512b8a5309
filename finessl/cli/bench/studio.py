"""finessl bench studio."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finessl.cli.bench import bench
from finessl.cli.options import Json


@bench.command()
def studio(
    images: Annotated[int, typer.Option(help="Images in the generated folder.", min=20)] = 10_000,
    labels: Annotated[int, typer.Option(help="Labels of the scripted labeler.", min=1)] = 200,
    refit: Annotated[str, typer.Option(help="Images of each refit, separated by commas.")] = "1000,10000,100000",
    folder: Annotated[Path | None, typer.Option(help="Where to write the images. [default: temporary folder]")] = None,
    json_: Json = False,
) -> None:
    """Time of the studio's first page, of a label, of a refit, of thumbnails; its memory."""
    import json

    from finessl.bench.studio import bench_studio
    from finessl.errors import FinesslError
    from finessl.runtime.progress import Display

    if not all(part.strip().isdecimal() and int(part) >= 100 for part in refit.split(",")):
        raise FinesslError(f"--refit {refit!r} should be numbers from 100 up, separated by commas.")
    with Display() as display:
        found = bench_studio(images, labels, [int(part) for part in refit.split(",")], folder, display.update)
    if json_:
        print(json.dumps(found))
        return
    print(f"{found['images']:,} images; encoding and thumbnails run meanwhile\n")
    print(f"  {'start until it listens':<34}{found['start_s']:10.2f} s")
    print(f"  {'first paint, from the first request':<34}{found['first_paint_s']:10.2f} s")
    rows = {"key": "label stored and answered", "key_and_image": "key to next image, not preloaded",
            "grid": "page of 200 in the grid", "thumbnail": "thumbnail from the pack"}  # fmt: skip
    for name, title in rows.items():
        print(f"  {title:<34}{found[name]['p50_ms']:10.1f} ms p50 {found[name]['p99_ms']:10.1f} ms p99")
    for row in found["refit"]:
        print(f"  {'refit at ' + format(row['images'], ','):<34}{row['seconds']:10.3f} s   {row['solver']}")
    rates = found["thumbnails"]
    print(f"  {'thumbnails':<34}{rates['per_second']:10,.0f} /s  (decoding alone, per core: "
          f"{rates['decoded_per_second_and_core']:,.0f} /s)")  # fmt: skip
    print(f"  {'labels of a script':<34}{found['labels_per_minute']:10,.0f} /min")
    if "memory_mb" in found:
        print(
            f"  {'memory of the server':<34}{found['memory_mb']:10,.0f} MB, at most {found['peak_memory_mb']:,.0f} MB"
        )
