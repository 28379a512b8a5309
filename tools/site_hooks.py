"""Hooks of mkdocs (see mkdocs.yml): pages from the whole repository, formulas as MathML.

README.md is the first page. Every page keeps its path in the repository, so that a relative link means the same on the
website and in the repository. Formulas become MathML when the site is built, which browsers draw without a script; the
font that they need for it comes with the package ziamath.
"""

from __future__ import annotations

import html
import re
from importlib.metadata import distribution
from pathlib import Path

from math_core import LatexToMathML
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from finessl.recipe.catalog import fields_table

ROOT = Path(__file__).parents[1]
OUTSIDE_DOCS = (  # pages, and files that pages link to
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "examples/arrays.py",
    "examples/own_images.py",
    "examples/own_method.py",
    "results/README.md",
    "finessl/assets/MODEL_CARD.md",
    "finessl/assets/sample/README.md",
)
FONT = "STIXTwoMath-Regular.ttf"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)
FIELDS = re.compile("<!-- fields: .*?-->")
CONVERTER = LatexToMathML()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages and pictures of docs/ under docs/, and the Markdown files of other folders."""
    of_docs = [f"docs/{file.src_uri}" for file in files if file.src_dir == config.docs_dir]
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    own = [File.generated(config, path, abs_src_path=str(ROOT / path)) for path in (*of_docs, *OUTSIDE_DOCS)]
    font = str(distribution("ziamath").locate_file(f"ziamath/fonts/{FONT}"))
    return Files([*of_theme, *own, File.generated(config, f"docs/assets/{FONT}", abs_src_path=font)])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The first page has no navigation; the page on recipes gets the table of their fields."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    return FIELDS.sub(lambda _: fields_table(), markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Each formula as MathML."""
    return FORMULA.sub(lambda found: mathml(found[3], display=found[2] == "["), content)


def on_post_build(config: MkDocsConfig) -> None:
    """The search index as a script, too: a page that was opened from the disk cannot read JSON."""
    folder = Path(config.site_dir, "search")
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")


def mathml(formula: str, *, display: bool) -> str:
    return CONVERTER.convert_with_local_state(html.unescape(formula), displaystyle=display)
