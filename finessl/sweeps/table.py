"""A table of results for a terminal, or as Markdown, LaTeX, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from finessl.errors import FinesslError

FORMATS = ("table", "markdown", "csv", "json", "latex")


@dataclass(frozen=True)
class Tabulated:
    """`rows` are for people; `records`, the same figures as plain numbers, for CSV and JSON."""

    caption: str
    header: list[str]
    rows: list[list[str]]
    records: list[dict[str, Any]]
    left: int = 1  # number of columns that hold names, aligned left
    ends: frozenset[int] = frozenset()  # a line follows these rows
    notes: list[str] = field(default_factory=list)


def check_format(form: str) -> str:
    if form not in FORMATS:
        raise FinesslError(f"--format {form}: choose from {', '.join(FORMATS)}.")
    return form


def show(table: Tabulated, form: str = "table") -> None:
    """Print it."""
    if check_format(form) != "table":
        print(render(table, form))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from finessl.runtime.terminal import console

    out = console()
    if not out.is_terminal:
        out = console(width=150)  # a file or a pipe has no width to fit in
    shown = Table(title=table.caption, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for number, name in enumerate(table.header):
        if number < table.left:
            shown.add_column(name, overflow="fold")
        else:  # numbers stay whole, so that a row is a line at 80 columns; the name above them may take two
            width = max([8, *(len(row[number]) for row in table.rows)])
            shown.add_column(name if len(name) <= width else name.replace(" ", "\n"), justify="right", no_wrap=True)
    before: list[str] = []
    for number, row in enumerate(table.rows):
        repeated = table.left > 1 and row[:1] == before[:1]  # the first name of a group is printed once
        shown.add_row(*(["", *row[1:]] if repeated else row), end_section=number in table.ends)
        before = row
    out.print(shown)
    for note in table.notes:
        out.print(f"  {note}")


def render(table: Tabulated, form: str) -> str:
    if form == "json":
        return json.dumps({"caption": table.caption, "rows": table.records, "notes": table.notes}, ensure_ascii=False)
    return {"markdown": markdown, "csv": as_csv, "latex": latex}[form](table)


def markdown(table: Tabulated) -> str:
    rule = [":--"] * table.left + ["--:"] * (len(table.header) - table.left)
    lines = [f"**{table.caption}**", "", *(f"| {' | '.join(row)} |" for row in (table.header, rule, *table.rows))]
    return "\n".join([*lines, *(["", *(f"- {note}" for note in table.notes)] if table.notes else [])])


def as_csv(table: Tabulated) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table.records[0]) if table.records else table.header, lineterminator="\n")
    writer.writeheader()
    for record in table.records:
        writer.writerow({k: json.dumps(v, ensure_ascii=False) if isinstance(v, dict) else v for k, v in record.items()})
    return text.getvalue().rstrip("\n")


def latex(table: Tabulated) -> str:
    """A booktabs table."""
    columns = "l" * table.left + "r" * (len(table.header) - table.left)
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{escape(table.caption)}}}"]
    lines += [rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}", r"\toprule", latex_row(table.header), r"\midrule"]
    for number, row in enumerate(table.rows):
        lines.append(latex_row(row))
        if number in table.ends and number + 1 < len(table.rows):
            lines.append(r"\midrule")
    lines += [r"\bottomrule", r"\end{tabular}", *(rf"% {note}" for note in table.notes), r"\end{table}"]
    return "\n".join(lines)


def latex_row(row: Sequence[str]) -> str:
    return " & ".join(map(escape, row)) + r" \\"


SYMBOLS = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "$": r"\$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "−": "$-$", "–": "--", "×": r"$\times$", "†": r"$\dagger$", "α": r"$\alpha$", "γ": r"$\gamma$",
    "λ": r"$\lambda$", "μ": r"$\mu$", "ρ": r"$\rho$", "ℓ": r"$\ell$", "₁": "$_1$", "≥": r"$\ge$",
}  # fmt: skip


def escape(text: str) -> str:
    return "".join(SYMBOLS.get(character, character) for character in text)
