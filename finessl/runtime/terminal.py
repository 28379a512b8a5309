"""Terminal output: text is printed literally, and every stream can print every text.

Class names, file names and paths are untrusted text. `console` never interprets markup in them. A stream whose encoding
lacks a character prints its nearest ASCII spelling instead of raising an error.
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
    """Let stdout and stderr print every text, independent of their encoding."""
    codecs.register_error("nearest-ascii", nearest_ascii)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a test or a notebook may have replaced them
            stream.reconfigure(errors="nearest-ascii")


def discard_stdout() -> None:
    """After a failed write to stdout: keep Python from failing again at exit, when it flushes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
