"""finessl probe."""

from __future__ import annotations

from typing import Annotated

import typer

from finessl.cli import app
from finessl.cli.options import Device, Fields, Json, recipe_options


@app.command(no_args_is_help=True)
@recipe_options("root", "path_column", "label_column", "weights", "image_size")
def probe(
    *,
    data: Annotated[
        str, typer.Argument(help="Data with training and test images, as for finessl train.", show_default=False)
    ],
    backbone: Annotated[str, typer.Option(help="Backbone (finessl list backbones), or any timm name.")] = "embedded",
    fields: Fields,
    labels_per_class: Annotated[
        int, typer.Option("--labels-per-class", "-n", help="Labels per class of the class means.")
    ] = 4,
    precision: Annotated[
        str, typer.Option(help="Number format: fp32; bf16, fp8 and auto are faster and less exact.")
    ] = "fp32",
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Measure a backbone's frozen features on some data.

    k-NN, linear probe and class means of a few labels.
    """
    from dataclasses import asdict

    from finessl.inference.probe import probe as measure
    from finessl.runtime.device import resolve_device
    from finessl.runtime.precision import resolve_precision
    from finessl.runtime.progress import Display

    target = resolve_device(device)
    with Display() as display:
        result = measure(
            data, **fields, backbone=backbone, device=target,
            labels_per_class=labels_per_class, precision=resolve_precision(precision, target), progress=display.update,
        )  # fmt: skip
    if json_:
        import json

        print(json.dumps(asdict(result)))
        return
    print(f"{backbone} on {data}: {result.train_images:,} training and {result.test_images:,} test images")
    print(f"  k-NN (k = 20)                  {result.knn:.2%}")
    print(f"  linear probe                   {result.linear:.2%}")
    mean, deviation = result.prototypes
    print(f"  class means of {result.labels_per_class} labels each   {mean:.2%} ± {deviation:.2%} (10 seeds)")
