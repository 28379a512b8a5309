"""finessl probe."""

from __future__ import annotations

from typing import Annotated

import typer

from finessl.cli import app


@app.command(no_args_is_help=True)
def probe(
    data: Annotated[str, typer.Argument(help="A source with train and test images.", show_default=False)],
    root: Annotated[str | None, typer.Option(help="Folder containing the named data set.")] = None,
    backbone: Annotated[str, typer.Option(help="Alias or timm name.")] = "embedded",
    weights: Annotated[str | None, typer.Option(help="The backbone's weights.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels at the input.")] = None,
    labels_per_class: Annotated[
        int, typer.Option("--labels-per-class", "-n", help="For the few-label prototypes.")
    ] = 4,
    precision: Annotated[str, typer.Option(help="fp32; bf16, fp8 or auto: faster, less exact.")] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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
            data, root=root, backbone=backbone, weights=weights, image_size=image_size, device=target,
            labels_per_class=labels_per_class, precision=resolve_precision(precision, target), progress=display.update,
        )  # fmt: skip
    if json_:
        import json

        print(json.dumps(asdict(result)))
        return
    print(f"{backbone} on {data}: {result.train_images:,} training and {result.test_images:,} test images")
    print(f"  k-NN (k = 20)                  {result.knn:.2%}")
    print(f"  linear probe                   {result.linear:.2%}")
    mean, deviation = result.prototypes or (0.0, 0.0)
    print(f"  class means of {result.labels_per_class} labels each   {mean:.2%} ± {deviation:.2%} (10 seeds)")
