"""Plug-ins: methods, tuning strategies, sources, splits, views and heads from outside the package.

    finessl train DATA --plugin my_method.py --method my-method          a file
    finessl train DATA --plugin my_package.methods                       an importable module
    [project.entry-points."finessl.plugins"]                             an installed package: always loaded
    my_package = "my_package.methods"

A plug-in is Python code that calls `register` of a registry when it is imported. A recipe records the plug-ins of a run,
files with the SHA-256 of their content: "/home/me/my_method.py#sha256=…". Training imports what a recipe records.
Prediction, evaluation and reports never do: a run directory from somebody else runs no code. They import a plug-in only
when the user names it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from finessl.errors import FinesslError

GROUP = "finessl.plugins"  # of entry points
MARK = "#sha256="


def record(name: str) -> str:
    """What a recipe keeps of a plug-in: absolute path and hash of a file, or the name of a module."""
    path, mark, _ = name.partition(MARK)
    if mark or not is_file(path):
        return name
    file = Path(path).expanduser().resolve()
    return f"{file}{MARK}{sha256(file)}"


def content(recorded: str) -> str:
    """A recorded plug-in without its folder: what decides a run's result."""
    path, mark, digest = recorded.partition(MARK)
    return f"{Path(path).name}{mark}{digest}" if mark else recorded


def load(names: Iterable[str], *, outside: Path | None = None) -> None:
    """Import plug-ins.

    names: recorded plug-ins, or plug-ins as the user names them.   outside: a run directory, whose own files are never
    imported.
    """
    for name in names:
        path, _, digest = name.partition(MARK)
        if not is_file(path):
            import_named(path)
            continue
        file = Path(path).expanduser().resolve()
        if digest and loaded_content(file.stem) == digest:  # the user has named this content at another path
            continue
        if outside is not None and file.is_relative_to(outside.resolve()):
            raise FinesslError(
                f"the plug-in {file} is inside the run directory, and code in a run directory is not run. Copy it "
                "elsewhere and name it with --plugin."
            )
        if sha256(file) != (digest or sha256(file)):
            raise FinesslError(
                f"the plug-in {file} has changed since the run began (recorded SHA-256 {digest[:12]}…). Restore it, or "
                "start a new run with another --out."
            )
        import_file(file)


def is_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name or "\\" in name


def sha256(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise FinesslError(f"the plug-in {file} cannot be read: {error.strerror}.") from error


def loaded_content(name: str) -> str | None:
    """SHA-256 of the file of an imported module; None if it is not imported."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return sha256(Path(file)) if file else None


def import_file(file: Path) -> ModuleType:
    """Import a file under its own name, as `import my_method` would."""
    name = file.stem
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) and Path(str(known.__file__)).resolve() == file:
            return known
        raise FinesslError(f"the plug-in {file} has the name of another module, {name!r}: rename the file.")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise FinesslError(f"the plug-in {file} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise FinesslError(f"the plug-in {file} fails when it is imported: {type(error).__name__}: {error}") from error
    return module


def import_named(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise FinesslError(
            f"the plug-in {name!r} cannot be imported ({type(error).__name__}: {error}). Name a file, my_method.py, or "
            "a module that is installed."
        ) from error


@functools.cache
def load_installed() -> None:
    """Import the plug-ins of installed packages, once."""
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            raise FinesslError(
                f"the installed plug-in {entry.name!r} fails when it is imported: {type(error).__name__}: {error}"
            ) from error
