"""The page is what the server sends: no other origin, no markup made from names, no module that is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import finessl

STATIC = Path(finessl.__file__).parent / "studio" / "static"
FILES = sorted(path for path in STATIC.iterdir() if path.suffix in (".js", ".css", ".html"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_from_elsewhere(path: Path) -> None:
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", path.read_text()))
    assert addresses <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".js"], ids=lambda path: path.name)
def test_names_never_become_markup(path: Path) -> None:
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", path.read_text()
    )


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".js"], ids=lambda path: path.name)
def test_imports_exist(path: Path) -> None:
    for names, module in re.findall(r"import (?:\{([^}]*)\}|\* as \w+) from \"\./([\w.]+)\"", path.read_text()):
        text = (STATIC / module).read_text()
        for name in filter(None, (part.strip() for part in names.split(","))):
            assert re.search(rf"export (?:async )?(?:function|class|const) {name}\b", text), f"{name} of {module}"


def test_no_inline_script_or_style() -> None:
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"\sstyle=|<style|\son\w+=|<script(?![^>]*src=)", page)
    for name in re.findall(r"/static/([\w.]+)", page):
        assert (STATIC / name).is_file()
