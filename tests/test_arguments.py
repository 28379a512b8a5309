"""Every argument of what users and plug-in authors call is explained in its docstring."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator

import pytest

import finessl
from finessl.estimator import FIELDS

# Modules whose functions and classes are called from outside, with those names; without names, all of the module's.
PUBLIC = {
    "finessl": finessl.__all__,
    "finessl.api": ["plan", "make_recipe"],
    "finessl.methods.base": [],
    "finessl.methods.parts": [],
    "finessl.models.backbones": ["create_backbone", "candidate_backbones"],
    "finessl.models.heads": ["Head"],
    "finessl.models.tuning": ["create"],
    "finessl.models.tuning.base": ["Tuning", "Wrapper", "transformer", "last_blocks", "factory_kwargs", "uniform", "normal"],
    "finessl.data.dataset": ["Dataset", "label_ids"],
    "finessl.data.images": ["Images", "ArrayImages", "FileImages"],
    "finessl.data.sources": ["open_dataset"],
    "finessl.data.sources.table": ["files"],
    "finessl.data.splits": ["Split", "Draw", "make_split"],
    "finessl.data.views": ["View", "create_view", "normalise"],
    "finessl.registry": [],
    "finessl.registry.plugins": ["load"],
    "finessl.recipe.schema": ["Recipe", "declare"],
    "finessl.recipe.files": ["parse_setting", "find_recipe"],
    "finessl.runs.directory": ["RunDirectory"],
    "finessl.runs.checkpoint": ["save", "newest", "load"],
    "finessl.training.loop": ["train"],
    "finessl.training.quick": ["quick"],
    "finessl.training.plan": ["make_plan", "read_budget"],
    "finessl.inference.evaluate": ["evaluate_run", "predict_images"],
    "finessl.inference.predict": ["predict_files", "abstain"],
    "finessl.inference.bulk": ["predict_bulk"],
    "finessl.inference.audit": ["sample_images", "audit_run", "error_rate", "read_audit"],
    "finessl.inference.export": ["export_run"],
    "finessl.inference.onnx_session": ["OnnxClassifier"],
    "finessl.inference.probe": ["probe"],
    "finessl.sweeps.compare": ["make_cells", "without_misfits", "summarise", "tabulate", "save_summary"],
    "finessl.sweeps.engines": ["run_cells"],
    "finessl.sweeps.paper.grid": ["make_grid"],
    "finessl.analysis.report": ["write_report"],
    "finessl.analysis.figures": ["draw"],
    "finessl.analysis.runs": ["read_runs"],
    "finessl.runtime.progress": ["Display"],
}  # fmt: skip
# These mean the same everywhere: the device as torch names it, callbacks, the position of an image.
KNOWN = {
    "self",
    "cls",
    "device",
    "progress",
    "log",
    "display",
    "i",
    *FIELDS,
}  # and recipe fields, which `declare` explains
PLAIN = {"Any", "Path", "Tensor"}  # types that say nothing about the meaning, unlike Dataset or Recipe


def callables() -> Iterator[tuple[str, Callable[..., object], str]]:
    """(name, function, its docstring and its class's)."""
    for path, names in PUBLIC.items():
        module = importlib.import_module(path)
        own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == path]
        for name in names or [name for name in own if not name.startswith("_")]:
            thing = getattr(module, name)
            if inspect.isclass(thing):
                yield from methods(f"{path}.{name}", thing)
            elif callable(thing):
                yield f"{path}.{name}", thing, thing.__doc__ or ""


def methods(name: str, cls: type) -> Iterator[tuple[str, Callable[..., object], str]]:
    about = cls.__doc__ or ""
    for key, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        if key == "__init__" and dataclasses.is_dataclass(cls):  # comments explain the fields
            continue
        if inspect.isfunction(function) and (key == "__init__" or not key.startswith("_")):
            inherited = " ".join(getattr(base, key, None).__doc__ or "" for base in cls.__mro__ if hasattr(base, key))
            yield f"{name}.{key}", function, f"{about} {inherited}"


CALLABLES = {name: (function, text) for name, function, text in callables()}


@pytest.mark.parametrize("name", CALLABLES)
def test_arguments_are_explained(name: str) -> None:
    function, text = CALLABLES[name]
    lacking = []
    for argument in inspect.signature(function).parameters.values():
        kind = str(argument.annotation)
        of_package = kind.isidentifier() and kind[0].isupper() and kind not in PLAIN
        variable = argument.kind in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL)
        if argument.name not in KNOWN and not of_package and not variable:
            lacking += [] if re.search(rf"\b{argument.name}\b", text) else [argument.name]
    assert not lacking, f"the docstring of {name} does not mention {', '.join(lacking)}"
