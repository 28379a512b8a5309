"""HTML that cannot be broken into: text is escaped wherever it is put, unless it is `Html` already."""

from __future__ import annotations

import html
from importlib import resources
from typing import Any


class Html(str):
    """Text that is HTML already."""


def el(tag: str, *children: Any, **attributes: Any) -> Html:
    """el("p", "a < b", class_="note") → <p class="note">a &lt; b</p>; None and False are left out."""
    written = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in ("img", "meta", "br", "col"):
        return Html(f"<{tag}{written}>")
    return Html(f"<{tag}{written}>{join(*children)}</{tag}>")


def join(*children: Any) -> Html:
    parts: list[str] = []
    for child in children:
        if isinstance(child, (list, tuple)):
            parts.append(join(*child))
        elif child is not None and child is not False:
            parts.append(
                child if isinstance(child, Html) else html.escape(str(child)).replace(" %", "\N{NO-BREAK SPACE}%")
            )
    return Html("".join(parts))


def table(head: list[Any] | None, rows: list[list[Any]], *, numbers: int) -> Html:
    """All columns from the `numbers`-th on hold numbers and are set flush right."""

    def cell(tag: str, value: Any, column: int) -> Html:
        return el(tag, value, class_="number" if column >= numbers else None, scope="col" if tag == "th" else None)

    top = el("thead", el("tr", [cell("th", value, k) for k, value in enumerate(head)])) if head else None
    body = [el("tr", [cell("td", value, k) for k, value in enumerate(row)]) for row in rows]
    return el("div", el("table", top, el("tbody", body)), class_="scroll", tabindex="0")


def page(title: str, *body: Any) -> Html:
    """A whole document. The policy forbids scripts and every request, should anything slip through."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    style = Html((resources.files("finessl.analysis") / "report.css").read_text(encoding="utf-8"))
    head = el(
        "head",
        el("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", style),
    )
    return Html("<!doctype html>\n" + el("html", head, el("body", *body), lang="en") + "\n")
