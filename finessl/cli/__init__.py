"""The command line:
`finessl train | evaluate | predict | split | inspect | figure | report
 | demo | compare | paper | probe | list | bench | doctor`.

Each verb is a thin function in a module of its own; torch and timm are imported inside, so that --help is fast.
"""

from __future__ import annotations

import sys

import typer

from finessl.errors import FinesslError

app = typer.Typer(
    name="finessl",
    help="Image classifiers from very few labels: semi-supervised fine-tuning of vision foundation models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

from finessl.cli import benchmarks, data, demo, grid, listing, predict, report, train  # noqa: E402, F401 - each adds its verbs to `app`


def main() -> None:
    """Run a verb; a user's mistake ends in one sentence, not in a traceback."""
    try:
        app()
    except FinesslError as error:
        print(f"finessl: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("finessl: interrupted.", file=sys.stderr)
        sys.exit(130)
