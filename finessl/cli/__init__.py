"""The command line: a module per verb, each a thin function.

torch and timm are imported inside the functions, and a verb's options are built when the verb is called, so that --help
is fast.
"""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
import typer.core
from typer.main import get_command

from finessl.cli.options import expand
from finessl.errors import FinesslError
from finessl.runtime.terminal import discard_stdout, prepare_streams

# In the order of the work, for --help: look at the data, train, measure, use; then grids of runs, then the rest.
VERBS = (
    "demo", "studio", "inspect", "quick", "select", "train", "resume", "evaluate", "audit", "predict", "report", "export",
    "serve", "compare", "paper", "figure", "split", "probe", "list", "doctor", "cache", "bench",
)  # fmt: skip


class Verbs(typer.Typer):
    """A group of verbs whose options are built when the verb is called: some are generated from the recipe's schema."""

    def __init__(self, order: tuple[str, ...] = (), **settings: Any) -> None:
        self.verbs: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {}  # name → function, typer's settings
        verbs = self.verbs

        class Group(typer.core.TyperGroup):
            def list_commands(self, ctx: Any) -> list[str]:
                return sorted({*verbs, *self.commands}, key=(order or tuple(verbs)).index)

            def get_command(self, ctx: Any, cmd_name: str) -> Any:
                if cmd_name in verbs and cmd_name not in self.commands:
                    function, settings = verbs[cmd_name]
                    single = typer.Typer(add_completion=False, rich_markup_mode=None)
                    single.command(cmd_name, **settings)(expand(function))
                    self.commands[cmd_name] = get_command(single)
                return super().get_command(ctx, cmd_name)

            def resolve_command(self, ctx: Any, args: list[str]) -> Any:
                for name in () if args[0] in verbs else verbs:  # a wrong name: the nearest of all is suggested
                    self.get_command(ctx, name)
                return super().resolve_command(ctx, args)

            def format_commands(self, ctx: Any, formatter: Any) -> None:
                with formatter.section("Commands"):
                    formatter.write_dl([(name, self.summary(ctx, name)) for name in self.list_commands(ctx)])

            def summary(self, ctx: Any, name: str) -> str:
                """The first line of the verb's description."""
                text = verbs[name][0].__doc__ if name in verbs else self.commands[name].help
                return (text or "").strip().partition("\n")[0]

        super().__init__(
            cls=Group, no_args_is_help=True, add_completion=False,
            rich_markup_mode=None,  # plain help: at 80 columns, panels leave a third of the width for the text
            pretty_exceptions_enable=False, **settings,
        )  # fmt: skip

    def command(self, name: str | None = None, **settings: Any) -> Any:  # type: ignore[override]
        def add(function: Callable[..., None]) -> Callable[..., None]:
            self.verbs[name or function.__name__] = function, settings
            return function

        return add


app = Verbs(VERBS, name="finessl", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})


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


def add_verbs(package: str, folders: Iterable[str]) -> None:
    """Import the modules of a package: each adds its verbs to a group."""
    for module in pkgutil.iter_modules(folders):
        importlib.import_module(f"{package}.{module.name}")


add_verbs(__name__, __path__)


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
    """End without Python's own end. That aborts the process while a thread imports a C++ library or reads weights, and after a
    KeyboardInterrupt that has passed through a C library Python would kill itself by SIGINT."""
    print(f"finessl: {message}", file=sys.stderr, flush=True)
    os._exit(status)
