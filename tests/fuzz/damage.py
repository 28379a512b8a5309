"""Ways to spoil bytes, JSON and names, each chosen by a case's random numbers."""

from __future__ import annotations

import random
from typing import Any

DEEP = "[" * 5000
# Values of the wrong kind for almost any field.
VALUES: tuple[Any, ...] = (
    None, True, [], {}, "", "x", "²", -1, 10**30, -(10**400), 1e308, -1e308, float("nan"), float("inf"), [[1]], {"a": 1},
    "\udcff", "\0", "../../etc/passwd", "a" * 100_000,
)  # fmt: skip
# The same on a command line or in TOML; nothing here may be read as a long training that is worth starting.
TEXTS = (
    "", " ", "x", "²", "٣", "--5", "+-5", "1__0", "1_0.5_", "-1", "-0.5", "nan", "inf", "-inf", "1e308", "-1e308", "1e-400",
    "0x10", "0", "true", "none", "None", "null", "[]", "[1, 2]", "[[1]]", "{a=1}", "{}", "2020-01-01", "12:30:00",
    "2020-01-01T00:00:00Z", '"text"', "'text'", '"', "'''", "\x7f", "\t", "\n", "a\nb = 1", "#", "=", "a=b", "a.b.c",
    "9" * 400, "9" * 5000, "-" + "9" * 25, "9" * 20, "1e25", DEEP, "[/bold]", "$\\frac{1}{0$", "%s%n{0}", "é", "\u202e",
    "../../x", "/dev/full", "/dev/null", "/proc/self/mem", "~", "*", "-", "--", "-h",
)  # fmt: skip


def spoil(rng: random.Random, data: bytes) -> bytes:
    """Cut, flipped, overwritten, lengthened, repeated or replaced bytes."""
    size = len(data)
    how = rng.choice(("cut", "flip", "flips", "zeros", "noise", "insert", "tail", "double", "empty", "text"))
    place = rng.randrange(size) if size else 0
    if how == "cut":
        return data[:place]
    if how in ("flip", "flips"):
        changed = bytearray(data)
        for _ in range(1 if how == "flip" else rng.randint(2, 40)):
            if changed:
                changed[rng.randrange(size)] ^= 1 << rng.randrange(8)
        return bytes(changed)
    length = min(rng.randint(1, 64), size - place)
    if how == "zeros":
        return data[:place] + bytes(length) + data[place + length :]
    if how == "noise":
        return data[:place] + rng.randbytes(length) + data[place + length :]
    if how == "insert":
        return data[:place] + rng.randbytes(rng.randint(1, 64)) + data[place:]
    if how == "tail":
        return data + rng.randbytes(rng.randint(1, 1000))
    if how == "double":
        return data + data
    return (
        b""
        if how == "empty"
        else rng.choice((b"<!DOCTYPE html><html>not here</html>", b"\0" * 64, b"x", b"null\n", b"\xff\xfe"))
    )


def spoil_tree(rng: random.Random, tree: Any) -> Any:
    """A JSON tree with one value replaced, removed or moved."""
    if rng.random() < 0.15 or not isinstance(tree, (dict, list)) or not tree:
        return rng.choice(VALUES)
    key = rng.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    how = rng.random()
    if isinstance(tree, dict) and how < 0.25:
        return {k: v for k, v in tree.items() if k != key}
    if isinstance(tree, dict) and how < 0.35:
        return {**tree, rng.choice(("", "x", "\0", "__class__")): rng.choice(VALUES)}
    changed = dict(tree) if isinstance(tree, dict) else list(tree)
    changed[key] = spoil_tree(rng, tree[key]) if how < 0.75 else rng.choice(VALUES)
    return changed
