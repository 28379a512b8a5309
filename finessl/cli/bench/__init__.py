"""finessl bench: speed and memory, measured here. Modules by what is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finessl.cli import Verbs, add_verbs, app

if TYPE_CHECKING:
    from finessl.bench.data import Rate
    from finessl.recipe import Recipe

bench = Verbs(help="Measure speed and memory on this machine.")
app.add_typer(bench, name="bench")


def bench_recipe(fields: Mapping[str, Any], data: str = "", settings: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a benchmark: the defaults, `fields` by their short names, `settings` by dotted names, and a backbone with
    random weights."""
    from finessl.api import make_recipe

    own = fields.get("backbone") == "embedded"
    more = {"data.source": data, "split.labels_per_class": 4, "model.pretrained": own, **(settings or {})}
    return make_recipe(None, dict(fields), more)


def print_rates(rows: Sequence[Rate], json_: bool) -> None:
    import json

    if json_:
        print(json.dumps([row.as_dict() for row in rows]))
        return
    width = max([20, *(len(row.part) for row in rows)])
    print(f"{'':<{width}}{'images/s':>12}{'ratio':>8}   against")
    for row in rows:
        known = row.as_dict()
        against = f"{known['ratio']:>8.2f}   {row.reference}, {row.reference_rate:,.0f}" if row.reference else ""
        print(f"{row.part:<{width}}{row.rate:>12,.0f}{against}")


add_verbs(__name__, __path__)
