"""Options that several verbs share, and the options that are generated from the recipe's fields."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

Text = str | None
Texts = list[str] | None
Fields = dict[str, Any]  # short name → value, of the options that were given

Data = Annotated[
    str,
    typer.Argument(
        help="A folder labeled/CLASS/… with unlabeled/… (and test/CLASS/…); a class folder CLASS/… or train/CLASS, "
        "test/CLASS with --labels-per-class; a CSV with path,label (empty label: unlabeled); or a data set's name "
        "(finessl list datasets).",
        show_default=False,
    ),
]
Run = Annotated[Path, typer.Argument(help="Run directory, or its classifier/ folder.", show_default=False)]


def load_plugins(names: Texts) -> Texts:
    from finessl.registry import plugins

    plugins.load(names or ())
    return names


Plugins = Annotated[  # imported before the verb runs
    Texts,
    typer.Option(
        "--plugin",
        help="Python file or module that registers methods, tunings, … of your own; repeatable.",
        callback=load_plugins,
    ),
]
Set = Annotated[
    Texts, typer.Option("--set", help="Any recipe field (finessl list fields): --set method.alpha=4; repeatable.")
]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 …")]
Compile = Annotated[
    bool | None,
    typer.Option("--compile/--no-compile", help="torch.compile. [default: on a GPU, for long runs that need it]"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Moved = Annotated[Text, typer.Option(help="File with the backbone's weights, if it moved.")]
Weights = Annotated[
    Texts, typer.Option(help="A backbone's weights file, NAME=FILE; repeatable. [default: the hub's cache]")
]
FeatureBackbone = Annotated[
    str,
    typer.Option(
        help="Backbone of the features (finessl list backbones); auto: the first whose weights are on this machine."
    ),
]


Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def note(message: str) -> None:
    """Print to standard error: the output itself may go to a file."""
    print(message, file=sys.stderr)


def option_group(parameter: str, options: Callable[[], list[inspect.Parameter]]) -> Decorator:
    """In place of this parameter, a dict, the verb has these options; the dict holds those that are not None."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        function.option_groups = {parameter: options, **getattr(function, "option_groups", {})}  # type: ignore[attr-defined]
        return function

    return mark


def recipe_options(*names: str) -> Decorator:
    """Options of these short names, as the parameter `fields: Fields`; without names, all."""

    def options() -> list[inspect.Parameter]:
        from finessl.recipe.catalog import short_names

        return [recipe_option(name) for name in names or short_names()]

    return option_group("fields", options)


def expand(function: Callable[..., None]) -> Callable[..., None]:
    """The verb with the options of its groups as parameters, which typer reads."""
    groups = {name: options() for name, options in getattr(function, "option_groups", {}).items()}
    if not groups:
        return function

    @functools.wraps(function)
    def verb(**arguments: Any) -> None:
        for name, options in groups.items():
            values = {option.name: arguments.pop(option.name) for option in options}
            arguments[name] = {option: value for option, value in values.items() if value is not None}
        function(**arguments)

    parameters = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        these = groups.get(parameter.name, [parameter])
        parameters += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in these]
    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return verb


def recipe_option(name: str) -> inspect.Parameter:
    """A parameter that is None unless it is given: the recipe then decides."""
    from finessl.recipe.catalog import default_of, short_names
    from finessl.registry.options import alternatives, literals

    setting = short_names()[name]
    kind, choices, default = alternatives(setting.kind)[0], literals(setting.kind), default_of(setting)
    info = typer.Option(
        f"--{name.replace('_', '-')}",
        *([setting.flag] if setting.flag else []),
        help=setting.help + (f" [default: {default}]" if default and kind is not bool else ""),
        metavar=f"[{'|'.join(choices)}]" if choices else None,
    )
    annotation = Annotated[(str if choices else kind) | None, info]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
