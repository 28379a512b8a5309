"""finessl studio."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finessl.cli import app
from finessl.cli.options import Device, FeatureBackbone, Weights
from finessl.cli.quick import named_files


@app.command(no_args_is_help=True)
def studio(
    data: Annotated[str, typer.Argument(help="Folder or table of images, or a run directory.", show_default=False)],
    run: Annotated[Path | None, typer.Option(help="Finished run on these images.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for labels and runs. [default: DATA.finessl]")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback open it to the network.")] = (
        "127.0.0.1"
    ),
    port: Annotated[
        int | None,
        typer.Option(help="Port; 0 chooses a free one. [default: that of the last time]", min=0, max=65535),
    ] = None,
    backbone: FeatureBackbone = "auto",
    weights: Weights = None,
    device: Device = "auto",
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, open no browser.")] = False,
) -> None:
    """Label, train, review, audit and export in the browser.

    Labels are kept in DATA.finessl/labels.csv, for --labels of quick and train. The images are never changed.
    """
    import os
    import sys
    import webbrowser

    from finessl.runtime.machine import return_freed_memory
    from finessl.runtime.network import address_of, bind, bind_again
    from finessl.studio.project import last_port, open_project
    from finessl.studio.server import Access, serve
    from finessl.studio.session import opened

    return_freed_memory()
    files = named_files(weights or [])
    project = open_project(data, out, run)
    listener = bind_again(host, last_port(project.folder)) if port is None else bind(host, port)
    listener.listen(128)  # the browser may be faster than the server
    project.port = listener.getsockname()[1]
    with opened(project, backbone, files, device) as session:
        access = Access(host, project.port)
        address = f"{address_of(host, listener)}/auth?token={access.token}"
        print(f"{project.name}: {len(project.images):,} images, labels in {project.folder}")
        for note in (*project.notes, *session.notes()):
            print(f"Note: {note}")
        print(f"{address}   (Ctrl-C stops)", flush=True)
        if not no_browser:
            webbrowser.open(address)
        serve(session, access, listener)
    sys.stdout.flush()
    os._exit(0)  # threads that still compute would end in an abort of torch; all that counts is on the disk
