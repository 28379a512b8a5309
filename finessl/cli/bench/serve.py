"""finessl bench serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from finessl.cli.bench import bench
from finessl.cli.options import Device, Json


@bench.command()
def serve(
    run: Annotated[Path, typer.Argument(help="Run directory, or an onnx export of one.", show_default=False)],
    clients: Annotated[int, typer.Option(help="Clients that send photos at the same time.", min=1, max=256)] = 16,
    requests: Annotated[int, typer.Option(help="Requests of one photo each.", min=1)] = 300,
    repeats: Annotated[int, typer.Option(help="Requests of 32 photos; the median counts.", min=1)] = 9,
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """A server on this machine under load, and its overhead over bare prediction in requests of 32 photos."""
    from dataclasses import asdict

    from finessl.bench.serve import bench_serve

    found = bench_serve(run, device=device, clients=clients, requests=requests, repeats=repeats)
    if json_:
        print(json.dumps(asdict(found)))
        return
    print(
        f"{clients} clients, {found.requests:,} requests of one photo: {found.requests_per_second:.1f} requests/s, "
        f"p50 {found.p50:.0f} ms, p99 {found.p99:.0f} ms, {found.errors} errors"
    )
    cpu = "" if found.cpu_overhead is None else f", {found.cpu_overhead:+.1%} in CPU time"
    print(
        f"requests of 32 photos: {found.server:.1f} images/s, without a server {found.bare:.1f} images/s: overhead "
        f"{found.overhead:+.1%}{cpu}"
    )
