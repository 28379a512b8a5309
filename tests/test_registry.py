"""Names resolve lazily; options are checked against the signature."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from finessl.errors import FinesslError
from finessl.recipe.catalog import REGISTRIES, registry
from finessl.registry import Registry
from finessl.registry.options import Count, Probability, argument_help, check_options, describe, options_of


class Thing:
    def __init__(
        self,
        size: int,
        *,
        rate: Probability = 0.5,
        kind: Literal["a", "b"] = "a",
        top: Count | None = None,
        many: int = 1,
        on: bool = False,
        text: str = "",
        names: list[str] = [],  # noqa: B006 - never changed
        pixels: Annotated[int, Field(ge=0)] | Probability = 0.5,
    ) -> None:
        self.rate = rate


def test_lookup_is_lazy_and_helpful() -> None:
    things = Registry("thing", {"decimal": ("decimal:Decimal", "numbers"), "broken": ("no.such.module:x", "never")})
    assert things["decimal"].__name__ == "Decimal"
    assert "broken" in things and things.summary("broken") == "never"
    with pytest.raises(FinesslError, match="unknown thing 'decimals'; did you mean decimal"):
        things["decimals"]
    with pytest.raises(FinesslError, match="plug-in"):
        things["decimals"]
    with pytest.raises(FinesslError, match=r"Known: a\.$"):  # plug-ins add none of these
        Registry("form", {"a": ("decimal:Decimal", "")}, plugins=False)["b"]
    things.register("mine", Thing, "a class itself")
    assert things["mine"] is Thing


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("rate", "0.25", 0.25),
        ("rate", 1, 1.0),
        ("top", "none", None),
        ("top", None, None),
        ("many", 3.0, 3),
        ("on", "yes", True),
        ("on", "off", False),
        ("names", "a,b", ["a", "b"]),
        ("pixels", 16, 16),
        ("pixels", 0.25, 0.25),
        ("text", "none", "none"),
    ],
)
def test_options_get_their_declared_types(option: str, value: Any, expected: Any) -> None:
    checked = check_options("thing", "x", Thing, {option: value})[option]
    assert checked == expected and type(checked) is type(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rat": 1}, "no option 'rat'; did you mean rate"),
        ({"rate": "fast"}, "thing x: rate = 'fast' should be a number between 0 and 1"),
        ({"rate": 1.5}, "should be a number between 0 and 1"),
        ({"rate": float("nan")}, "should be a number"),
        ({"rate": True}, "should be a number"),
        ({"kind": "c"}, "should be one of a, b"),
        ({"kind": 3}, "should be one of a, b"),
        ({"size": 3}, "no option 'size'"),
        ({"top": 1.5}, "should be an integer between 1 and 1,000,000 or none"),
        ({"many": True}, "should be an integer"),
        ({"many": "1.5"}, "should be an integer"),
        ({"many": "²"}, "should be an integer"),
        ({"many": "--5"}, "should be an integer"),
        ({"many": 10**400}, "beyond 64 bits"),
        ({"on": "maybe"}, "should be true or false"),
        ({"text": 3}, "should be a text"),
        ({"text": "a\0b"}, "NUL"),
        ({"text": "\ud800"}, "surrogate pair"),
    ],
)
def test_options_outside_their_declaration_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FinesslError, match=message):
        check_options("thing", "x", Thing, options)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(FinesslError) as caught:
        check_options("thing", "x", Thing, {"rat": 1, "kind": "c", "top": 0})
    assert len(str(caught.value).splitlines()) == 3


def test_options_are_described() -> None:
    assert describe(Thing, "rate") == "rate = 0.5  (a number between 0 and 1)"
    assert describe(Thing, "top") == "top = none  (an integer between 1 and 1,000,000 or none)"


def test_the_meaning_of_arguments_is_read_from_the_docstring() -> None:
    class Base:
        """size: of it,
        in pixels.   rate, share: between 0 and 1.

        Note: no argument. A rate: is not one either.
        """

    class Derived(Base):
        """share: another one."""

    base = {"size": "of it, in pixels", "rate": "between 0 and 1", "share": "between 0 and 1"}
    assert argument_help(Base).items() >= base.items()
    assert argument_help(Derived) == argument_help(Base) | {"share": "another one"}


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_option_says_what_it_means(kind: str) -> None:
    for name in registry(kind).names():
        target = registry(kind)[name]
        lacking = set(options_of(target)) - set(argument_help(target))
        assert not lacking, f"{kind}: the docstring of {name} has no line for {', '.join(sorted(lacking))}"
        assert all(": " in describe(target, option) for option in options_of(target))
