"""finessl serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finessl.cli import app
from finessl.cli.options import Device, Moved, Plugins


@app.command(no_args_is_help=True)
def serve(
    run: Annotated[Path, typer.Argument(help="Run directory, or an onnx export of one.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen on. Others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 chooses a free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="FINESSL_TOKEN",
            help="Token that clients must send. [default: none on loopback; elsewhere a random one, which is printed]",
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Maximum images per batch.", min=1, max=1024)] = 32,
    max_wait: Annotated[float, typer.Option(help="Milliseconds an image waits for its batch to fill.", min=0)] = 5,
    max_images: Annotated[int, typer.Option(help="Maximum images per request.", min=1)] = 256,
    max_mb: Annotated[float, typer.Option(help="Maximum megabytes per request.", min=0.001)] = 64,
    queue: Annotated[
        int, typer.Option(help="Maximum images waiting, over all requests; more are refused.", min=1)
    ] = 1024,
    weights: Moved = None,
    plugin: Plugins = None,
    device: Device = "auto",
    provider: Annotated[
        str | None, typer.Option(help="ONNX Runtime's execution provider: CPU, OpenVINO, CUDA … [default: CPU]")
    ] = None,
) -> None:
    """Serve predictions over HTTP.

    POST /predict takes an image, or several as multipart/form-data, and answers in JSON. GET /model names the classes.
    """
    import secrets

    from finessl.errors import FinesslError
    from finessl.inference.serve import Limits, Service, open_classifier
    from finessl.inference.serve import serve as run_server
    from finessl.runtime.network import address_of, bind, is_loopback

    local = is_loopback(host)
    if token == "":
        raise FinesslError("--token is empty; give one of at least a few characters, or leave the option out.")
    if queue < max_images:
        raise FinesslError(
            f"--queue {queue} is below --max-images {max_images}: such a request could never be answered."
        )
    listener = bind(host, port)
    classifier = open_classifier(run, weights=weights, device=device, provider=provider)
    if not local and token is None:
        token = secrets.token_urlsafe(32)
        print(f"token: {token}")
    limits = Limits(max_batch, max_wait / 1000, queue, max_images, max_mb)
    print(f"{address_of(host, listener)}/predict   (Ctrl-C stops)", flush=True)
    run_server(Service(classifier, limits, token, local), listener)
