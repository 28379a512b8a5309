"""finessl bench studio."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from finessl.cli.bench import bench
from finessl.cli.options import Json


@bench.command()
def studio(
    images: Annotated[int, typer.Option(help="Images in the generated folder.", min=20)] = 10_000,
    labels: Annotated[int, typer.Option(help="Labels of the scripted labeler.", min=1)] = 200,
    refit: Annotated[str, typer.Option(help="Images of each refit, separated by commas.")] = "1000,10000,100000",
    folder: Annotated[Path | None, typer.Option(help="Where to write the images. [default: temporary folder]")] = None,
    browser: Annotated[
        bool, typer.Option("--browser", help="Measure in Chromium too (needs finessl[browser]).")
    ] = False,
    json_: Json = False,
) -> None:
    """Time of the studio's first page, of a label, of a refit, of thumbnails; its memory."""
    import json

    from finessl.bench.studio import bench_studio
    from finessl.errors import FinesslError
    from finessl.runtime.progress import Display

    if not all(part.strip().isdecimal() and int(part) >= 100 for part in refit.split(",")):
        raise FinesslError(f"--refit {refit!r} should be numbers from 100 up, separated by commas.")
    if browser:
        from finessl.bench.browser import find_chromium

        find_chromium()
    with Display() as display:
        found = bench_studio(images, labels, [int(part) for part in refit.split(",")], folder, browser, display.update)
    if json_:
        print(json.dumps(found))
        return
    print_figures(found)


def print_figures(found: dict[str, Any]) -> None:
    def row(title: str, value: str) -> None:
        print(f"  {title:<42}{value}")

    def spread(title: str, values: dict[str, float]) -> None:
        row(title, f"{values['p50_ms']:10.1f} ms p50 {values['p99_ms']:10.1f} ms p99")

    print(f"{found['images']:,} images, their index and thumbnails made before\n")
    row("start until it listens", f"{found['start_s']:10.2f} s")
    row("first page and image over HTTP", f"{found['first_paint_s']:10.2f} s")
    row("features of all images, from the start", f"{found['encoded_s']:10.1f} s")
    spread("label stored and answered", found["key"])
    spread("and the next image, not preloaded", found["key_and_image"])
    spread("suggestions fitted to a label", found["suggestions"])
    spread("page of 200 in the grid", found["grid"])
    spread("thumbnail from the pack", found["thumbnail"])
    for one in found["refit"]:
        row(f"refit at {one['images']:,}", f"{one['seconds']:10.3f} s   {one['solver']}")
    rates = found["thumbnails"]
    row("thumbnails made", f"{rates['per_second']:10,.0f} /s  (decoding alone, per core: "
        f"{rates['decoded_per_second_and_core']:,.0f} /s)")  # fmt: skip
    row("labels of a script", f"{found['labels_per_minute']:10,.0f} /min")
    if "memory_mb" in found:
        row(
            "resident memory of the server",
            f"{found['memory_mb']:10,.0f} MB, at most {found['peak_memory_mb']:,.0f} MB",
        )
        row("with the process that encodes", f"{'':10}    at most {found['peak_of_all_mb']:,.0f} MB")
    if seen := found.get("browser"):
        scroll = seen["scroll"]
        print()
        row(
            "Chromium: first paint",
            f"{seen['first_paint_ms']:10,.0f} ms, with the first image {seen['first_image_ms']:,.0f} ms",
        )
        spread("Chromium: key to next image", seen["keys"])
        row("Chromium: longest blank while scrolling", f"{scroll['scroll_blank_ms']:10,.0f} ms")
        row("Chromium: longest blank after a jump", f"{scroll['jump_blank_ms']:10,.0f} ms")
        row(
            "Chromium: a frame while scrolling",
            f"{scroll['frame_p50_ms']:10.0f} ms p50 {scroll['frame_p99_ms']:10.0f} ms p99",
        )
