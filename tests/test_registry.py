"""Names resolve lazily; options are checked against the signature."""

from __future__ import annotations

from typing import Literal

import pytest

from finessl.errors import FinesslError
from finessl.registry import Registry, check_options, convert


class Thing:
    def __init__(self, size: int, *, rate: float = 0.5, kind: Literal["a", "b"] = "a", top: int | None = None) -> None:
        self.rate = rate


def test_lookup_is_lazy_and_helpful() -> None:
    things = Registry("thing", {"decimal": ("decimal:Decimal", "numbers"), "broken": ("no.such.module:x", "never")})
    assert things["decimal"].__name__ == "Decimal"
    assert "broken" in things and things.summary("broken") == "never"
    with pytest.raises(FinesslError, match="unknown thing 'decimals'; did you mean decimal"):
        things["decimals"]


def test_options_are_checked() -> None:
    assert check_options("thing", "x", Thing, {"rate": "0.25", "top": "none"}) == {"rate": 0.25, "top": None}
    for options, message in (
        ({"rat": 1}, "no option 'rat'; did you mean rate"),
        ({"rate": "fast"}, "rate = 'fast' should be float"),
        ({"kind": "c"}, "not one of a, b"),
        ({"size": 3}, "no option 'size'"),
        ({"top": 1.5}, "should be int or none"),
    ):
        with pytest.raises(FinesslError, match=message):
            check_options("thing", "x", Thing, options)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("yes", bool, True),
        ("off", bool, False),
        ("1_000", int, 1000),
        (3.0, int, 3),
        (2, float, 2.0),
        ("a,b", list[str], ["a", "b"]),
    ],
)
def test_convert(value: object, kind: object, expected: object) -> None:
    assert convert(value, kind, "x") == expected


@pytest.mark.parametrize(
    ("value", "kind"), [(True, int), ("1.5", int), (1.5, int), (True, float), ("maybe", bool), (3, str)]
)
def test_convert_refuses(value: object, kind: type) -> None:
    with pytest.raises(FinesslError, match="x = "):
        convert(value, kind, "x")
