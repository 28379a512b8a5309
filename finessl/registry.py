"""Names for methods, tuning strategies, sources…: each entry is imported only when it is asked for, so that
`finessl --help` and `finessl list` stay fast."""

from __future__ import annotations

import difflib
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from finessl.errors import FinesslError


def nearest(name: str, names: Iterable[str]) -> str:
    """'; did you mean …?' for the names that look like `name`, or ''."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


class Registry:
    """name → ("module:attribute", "one-line summary")."""

    def __init__(self, kind: str, entries: Mapping[str, tuple[str, str]]) -> None:
        self.kind = kind
        self.entries = dict(entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __getitem__(self, name: str) -> Any:
        if name not in self.entries:
            raise FinesslError(
                f"unknown {self.kind} {name!r}{nearest(name, self.entries) or '.'} Known: {', '.join(self.entries)}."
            )
        module, attribute = self.entries[name][0].split(":")
        return getattr(importlib.import_module(module), attribute)

    def names(self) -> list[str]:
        return list(self.entries)

    def summary(self, name: str) -> str:
        return self.entries[name][1]

    def register(self, name: str, target: str, summary: str) -> None:
        """Add an entry from outside the package (a user's own method, say)."""
        self.entries[name] = (target, summary)


def options_of(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a class or function: what a recipe may set."""
    signature = inspect.signature(target)
    return {n: p for n, p in signature.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def convert(value: Any, annotation: Any, what: str) -> Any:
    """`value` as `annotation` asks (strings from the command line are read), or a FinesslError naming `what`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any or annotation is inspect.Parameter.empty:
        return value
    if origin is Literal:
        if value in arguments:
            return value
        raise FinesslError(f"{what} = {value!r} is not one of {', '.join(map(str, arguments))}.")
    if origin in (Union, types.UnionType):
        if type(None) in arguments and (value is None or value in ("none", "None", "")):
            return None
        for choice in arguments:
            if choice is type(None):
                continue
            try:
                return convert(value, choice, what)
            except FinesslError:
                continue
        expected = " or ".join("none" if a is type(None) else getattr(a, "__name__", str(a)) for a in arguments)
        raise FinesslError(f"{what} = {value!r} should be {expected}.")
    if annotation is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
            return value.lower() in ("true", "yes", "on", "1")
    elif annotation is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lstrip("+-").replace("_", "").isdigit():
            return int(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif annotation is float:
        try:
            if not isinstance(value, bool):
                return float(value)
        except (TypeError, ValueError):
            pass
    elif annotation is str:
        if isinstance(value, str):
            return value
    elif (origin or annotation) in (list, tuple, dict):
        container = origin or annotation
        if container is dict and isinstance(value, Mapping):
            return dict(value)
        if container is not dict and isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if container is not dict and isinstance(value, (list, tuple)):
            inner = arguments[0] if arguments else Any
            return container(convert(v, inner, what) for v in value)
    elif isinstance(annotation, type) and isinstance(value, annotation):
        return value
    raise FinesslError(f"{what} = {value!r} should be {getattr(annotation, '__name__', annotation)}.")


def check_options(kind: str, name: str, target: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with their declared types; a FinesslError names an option that `target` does not take."""
    known = options_of(target)
    function = target.__init__ if inspect.isclass(target) else target  # type: ignore[misc]
    hints = typing.get_type_hints(function)
    checked = {}
    for option, value in options.items():
        if option not in known:
            near, listed = nearest(option, known) or ".", ", ".join(known) or "none"
            raise FinesslError(f"{kind} {name!r} has no option {option!r}{near} Its options: {listed}.")
        checked[option] = convert(value, hints.get(option, Any), f"{kind} {name}: {option}")
    return checked
