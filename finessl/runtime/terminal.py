"""What reaches the terminal: names are printed as they are, and every stream can show every text.

Class names, file names and paths are other people's text. `console` never interprets markup in them, and a stream
whose encoding lacks a character gets its nearest ASCII spelling instead of an error.
"""

from __future__ import annotations

import codecs
import os
import sys
from typing import Any

from rich.console import Console

ASCII = {
    "…": "...", "×": "x", "≈": "~", "±": "+-", "−": "-", "–": "-", "—": "-", "·": "-", "→": "->", "≥": ">=", "≤": "<=",
    "“": '"', "”": '"', "‘": "'", "’": "'", "₁": "1", "α": "alpha", "γ": "gamma", "λ": "lambda", "μ": "mu", "ρ": "rho",
    "κ": "kappa", "ℓ": "l", "†": "+", "✓": "v", "✗": "x", "\N{NO-BREAK SPACE}": " ",
}  # fmt: skip


def console(**settings: Any) -> Console:
    """A Rich console that prints text literally. Style it with `rich.text.Text` or `style=`, not with markup."""
    return Console(markup=False, emoji=False, highlight=False, **settings)


def nearest_ascii(error: UnicodeError) -> tuple[str, int]:
    """Error handler of a stream: known symbols in ASCII, everything else as \\xXX or \\uXXXX."""
    assert isinstance(error, UnicodeEncodeError)
    characters = error.object[error.start : error.end]
    spelled = (ASCII.get(c) or c.encode("ascii", "backslashreplace").decode() for c in characters)
    return "".join(spelled), error.end


def prepare_streams() -> None:
    """Make stdout and stderr print every text, whatever their encoding."""
    codecs.register_error("nearest-ascii", nearest_ascii)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not so where a test or a notebook has replaced them
            stream.reconfigure(errors="nearest-ascii")


def discard_stdout() -> None:
    """Nobody reads stdout any more, or it cannot be written: keep Python from failing once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
