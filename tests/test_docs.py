"""The website (mkdocs.yml): every page is in it, links lead somewhere, and the API reference names what exists."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def pages(nav: list[dict[str, Any]]) -> list[str]:
    values = [value for entry in nav for value in entry.values()]
    return [page for value in values for page in ([value] if isinstance(value, str) else pages(value))]


def site_pages() -> list[str]:
    return pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])


def test_every_page_is_in_the_navigation() -> None:
    listed = site_pages()
    assert len(set(listed)) == len(listed)
    missing = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - set(listed)
    assert not missing, "add them to `nav` in mkdocs.yml"
    code = (ROOT / "tools" / "site_hooks.py").read_text(encoding="utf-8")
    assert [page for page in listed if not page.startswith("docs/") and f'"{page}"' not in code] == []


@pytest.mark.parametrize("page", site_pages())
def test_links_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [link for link in LINK.findall(text) if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_the_reference_names_what_exists() -> None:
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.M)
    assert {"finessl.train", "finessl.load", "finessl.Classifier", "finessl.FineSSLClassifier"} <= set(names)
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert getattr(import_module(module), attribute).__doc__, name
