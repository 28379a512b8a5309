"""The command line: one module per verb or group of verbs. Each verb is a thin function.

torch and timm are imported inside the functions, so that --help is fast.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer
import typer.core

from finessl.errors import FinesslError
from finessl.runtime.terminal import discard_stdout, prepare_streams

# In the order of the work, for --help: look at the data, train, measure, use; then grids of runs, then the rest.
VERBS = (
    "demo", "studio", "inspect", "quick", "select", "train", "resume", "evaluate", "audit", "predict", "report", "export",
    "serve", "compare", "paper", "figure", "split", "probe", "list", "doctor", "cache", "bench",
)  # fmt: skip


class InOrderOfWork(typer.core.TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=VERBS.index)


app = typer.Typer(
    name="finessl",
    cls=InOrderOfWork,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: at 80 columns, panels leave a third of the width for the text
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def show_version(asked: bool) -> None:
    if asked:
        import finessl

        print(f"finessl {finessl.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Image classifiers from very few labels: semi-supervised fine-tuning of vision foundation models."""


from finessl.cli import (  # noqa: E402 - each adds its verbs to `app`
    audit,  # noqa: F401
    benchmarks,  # noqa: F401
    cache,  # noqa: F401
    data,  # noqa: F401
    demo,  # noqa: F401
    evaluate,  # noqa: F401
    export,  # noqa: F401
    grid,  # noqa: F401
    listing,  # noqa: F401
    predict,  # noqa: F401
    probe,  # noqa: F401
    quick,  # noqa: F401
    report,  # noqa: F401
    select,  # noqa: F401
    serve,  # noqa: F401
    studio,  # noqa: F401
    train,  # noqa: F401
)


def main() -> None:
    """Run a verb. What a user or a disk can do wrong ends in one sentence, not in a traceback."""
    prepare_streams()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except FinesslError as error:
        fail(str(error), error.status)
    except KeyboardInterrupt:
        fail("interrupted.", 130)
    except SystemExit as end:
        if end.code == 130:  # typer's exit status for Ctrl-C, without a word
            fail("interrupted.", 130)
        if end.code == 143:  # SIGTERM
            fail("terminated.", 143)
        raise
    except OSError as error:
        if error.filename is not None and error.strerror:  # the system's refusal names the file: too long, forbidden …
            fail(f"{os.fsdecode(error.filename)!s:.300}: {error.strerror}.", 1)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EIO):
            raise
        discard_stdout()
        if error.errno != errno.EPIPE:  # EPIPE: the reader has seen enough (… | head)
            fail(f"the output cannot be written: {error.strerror}.", 1)
        sys.exit(1)


def fail(message: str, status: int) -> None:
    print(f"finessl: {message}", file=sys.stderr, flush=True)
    if status > 128:  # Python would kill itself by SIGINT where KeyboardInterrupt has passed through a C library
        os._exit(status)
    sys.exit(status)
