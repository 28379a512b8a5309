"""Typed options: values from TOML, the command line or Python, checked against a declaration.

A declaration is a pydantic model (the sections of a recipe) or the keyword-only parameters of a class or function (the
options of a method, a tuning strategy, a view …). Type, range and default are written once, there:

    def __init__(self, task: Task, *, threshold: Probability = 0.7, layers: Count | None = None) -> None: ...

What an option means is in the docstring of the class or function: "threshold: least confidence that counts." (`argument_help`).
"""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, create_model, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from finessl.errors import FinesslError
from finessl.registry import nearest

Probability = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0, le=10**6)]  # of a loss, a margin, a decay
Count = Annotated[int, Field(ge=1, le=10**6)]

NONE = ("none", "None", "")  # how an optional value is left out on the command line and in TOML, which has no null
MAX_INTEGER = 2**63 - 1  # TOML's integers have 64 bits

OptionsT = TypeVar("OptionsT", bound="Options")


@dataclass(frozen=True)
class Choice:
    """A named thing (method, strategy, split, head, view) and its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


class Options(BaseModel):
    """Base of the declarations: fields are frozen, unknown ones refused, numbers finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)

    @field_validator("*", mode="before")
    @classmethod
    def read_text(cls, value: Any, info: ValidationInfo) -> Any:
        check_plain(value)
        return as_declared(value, cls.model_fields[str(info.field_name)].annotation)


def as_declared(value: Any, annotation: Any) -> Any:
    """What pydantic leaves open: "none" for None, "a,b" for a list, and no truth value for a number."""
    kinds = {get_origin(kind) or kind: get_args(kind) for kind in alternatives(annotation)}
    if type(None) in kinds and isinstance(value, str) and value in NONE:
        return None
    if isinstance(value, bool) and not kinds.keys() & {bool, Any}:
        raise ValueError
    items = kinds.get(list, kinds.get(tuple))
    if items is not None and isinstance(value, str) and str not in kinds:
        value = [part.strip() for part in value.split(",") if part.strip()]
    if items and isinstance(value, (list, tuple)):
        return [as_declared(item, items[0]) for item in value]
    if kinds.get(dict) and isinstance(value, Mapping):
        return {key: as_declared(item, kinds[dict][1]) for key, item in value.items()}
    return value


def parse(
    model: type[OptionsT], values: Mapping[str, Any], owner: str, name: Callable[[str], str]
) -> tuple[OptionsT | None, list[str]]:
    """The model with these values, or None and a sentence for each mistake.

    owner: what a field belongs to, as a sentence names it.   name: a field's full name.
    """
    try:
        return model.model_validate(dict(values)), []
    except ValidationError as error:
        wrong: dict[str, str] = {}
        for detail in error.errors(include_url=False):
            field = str(detail["loc"][0])
            if field not in model.model_fields:
                known = ", ".join(model.model_fields) or "none"
                wrong[field] = f"{owner} {field!r}{nearest(field, model.model_fields) or '.'} Known: {known}."
            elif detail["type"] == "unwritable":
                wrong[field] = f"{name(field)} {detail['msg']}."
            elif field not in wrong:
                info, value = model.model_fields[field], values[field]
                near = nearest(value, literals(info.annotation)) if isinstance(value, str) else ""
                wanted = expected(info.annotation, info.metadata)
                wrong[field] = f"{name(field)} = {shorten(value)} should be {wanted}{near or '.'}"
        return None, list(wrong.values())


# ---- options of a class or function ---------------------------------------------------------------------------------


def options_of(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a class or function: what a recipe may set."""
    signature = inspect.signature(target)
    return {
        n: p for n, p in signature.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY and n != "progress"
    }


@functools.cache
def options_model(target: Callable[..., Any]) -> type[Options]:
    """The declaration that the keyword-only parameters of `target` are."""
    declared = target.__init__ if inspect.isclass(target) and not is_dataclass(target) else target  # type: ignore[misc]
    hints = typing.get_type_hints(declared, include_extras=True)
    fields: dict[str, Any] = {
        name: (hints.get(name, Any), None if parameter.default is inspect.Parameter.empty else parameter.default)
        for name, parameter in options_of(target).items()
    }
    with warnings.catch_warnings():  # an option may have the name of one of pydantic's own methods
        warnings.simplefilter("ignore", UserWarning)
        return create_model(getattr(target, "__name__", "Options"), __base__=Options, **fields)


def find_mistakes(
    kind: str, name: str, target: Callable[..., Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """`values` with their declared types, and a sentence for each mistake."""
    made, mistakes = parse(
        options_model(target), values, f"{kind} {name!r} has no option", lambda field: f"{kind} {name}: {field}"
    )
    return {} if made is None else {field: getattr(made, field) for field in values}, mistakes


def check_options(kind: str, name: str, target: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with their declared types; a FinesslError names every mistake."""
    checked, mistakes = find_mistakes(kind, name, target, values)
    if mistakes:
        raise FinesslError("\n".join(mistakes))
    return checked


# ---- plain values ---------------------------------------------------------------------------------------------------


def check_plain(value: Any) -> None:
    """Refuse what a recipe file cannot hold."""
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise PydanticCustomError("unwritable", "is a number beyond 64 bits")
    if isinstance(value, str):
        if "\0" in value:
            raise PydanticCustomError("unwritable", "holds a NUL character")
        try:
            value.encode(errors="surrogateescape")  # which file names of other encodings pass
        except UnicodeEncodeError:
            raise PydanticCustomError("unwritable", "is not valid text: it holds half of a surrogate pair") from None
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_plain(key)
            check_plain(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_plain(item)


def plain(value: Any) -> Any:
    """As a recipe keeps it: lists instead of tuples, text instead of paths."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def shorten(value: Any, length: int = 60) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists within lists
        text = f"a very long {type(value).__name__}"
    return text if len(text) <= length else f"{text[:length]}…"


# ---- declarations in words ------------------------------------------------------------------------------------------


def alternatives(annotation: Any) -> list[Any]:
    """int | None → [int, NoneType], without ranges."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in alternatives(part)]
    return [annotation]


def literals(annotation: Any) -> list[str]:
    return [str(v) for kind in alternatives(annotation) if get_origin(kind) is Literal for v in get_args(kind)]


def expected(annotation: Any, metadata: Any = ()) -> str:
    """'an integer of at least 1, or none'."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return expected(arguments[0], [*arguments[1:], *metadata])
    if origin in (Union, types.UnionType):
        parts = [expected(part, metadata) for part in arguments if part is not type(None)]
        return " or ".join([*parts, *(["none"] if type(None) in arguments else [])])
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if origin in (list, tuple):
        return f"a list, each {expected(arguments[0])}" if arguments else "a list"
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a text",
        list: "a list",
        dict: "a table",
    }
    name = names.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))
    return f"{name}{limits(metadata)}"


def limits(metadata: Any) -> str:
    """' between 0 and 1', ' of at least 1'."""
    found: dict[str, Any] = {}
    for item in metadata:
        for entry in item.metadata if isinstance(item, FieldInfo) else [item]:
            found |= {k: v for k in ("gt", "ge", "lt", "le") if (v := getattr(entry, k, None)) is not None}
    if "ge" in found and "le" in found:
        return f" between {found['ge']:,} and {found['le']:,}"
    words = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
    return "".join(
        f"{' and' if i else ''} {words[k]} {found[k]:,}" for i, k in enumerate(k for k in words if k in found)
    )


def describe(target: Callable[..., Any], option: str) -> str:
    """'threshold = 0.7  (a number between 0 and 1): least confidence of a pseudo-label that is used'."""
    info = options_model(target).model_fields[option]
    default = "none" if info.default is None else plain(info.default)
    text = f"{option} = {default!r}  ({expected(info.annotation, info.metadata)})".replace("'none'", "none")
    meaning = argument_help(target).get(option, "")
    return f"{text}: {meaning}" if meaning else text


def argument_help(target: Callable[..., Any]) -> dict[str, str]:
    """Argument → its meaning, from the entries "name: meaning.   one, other: meaning." of the docstring. An entry begins a line
    or follows three spaces, and ends with its paragraph. A class has the entries of its bases, too."""
    owners = target.__mro__[::-1] if inspect.isclass(target) else [target]
    found: dict[str, str] = {}
    for text in (inspect.cleandoc(owner.__doc__ or "") for owner in owners if owner is not object):
        for paragraph in text.split("\n\n"):
            _, *entries = re.split(r"(?:^|(?<=   ))(\w+(?:, \w+)*): ", paragraph, flags=re.M)
            for names, meaning in zip(entries[::2], entries[1::2], strict=True):
                found |= dict.fromkeys(names.split(", "), " ".join(meaning.split()).removesuffix("."))
    return found
