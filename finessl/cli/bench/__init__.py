"""finessl bench: speed and memory, measured here. One module per benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finessl.cli import Verbs, app

if TYPE_CHECKING:
    from finessl.bench.data import Rate
    from finessl.recipe import Recipe

bench = Verbs(help="Measure speed and memory on this machine.")
app.add_typer(bench, name="bench")


def bench_recipe(fields: Mapping[str, Any]) -> Recipe:
    """The recipe of a benchmark: the defaults, `fields` by their short names, and a backbone with random weights."""
    from finessl.api import make_recipe

    more = {"split.labels_per_class": 4, "model.pretrained": fields.get("backbone") == "embedded"}
    return make_recipe(None, dict(fields), more)


def print_rates(rows: Sequence[Rate], json_: bool) -> None:
    import json

    if json_:
        print(json.dumps([row.as_dict() for row in rows]))
        return
    print(f"{'':<20}{'images/s':>12}{'ratio':>8}   against")
    for row in rows:
        known = row.as_dict()
        against = f"{known['ratio']:>8.2f}   {row.reference}, {row.reference_rate:,.0f}" if row.reference else ""
        print(f"{row.part:<20}{row.rate:>12,.0f}{against}")


from finessl.cli.bench import (  # noqa: E402 - each adds its verb
    augment,  # noqa: F401
    data,  # noqa: F401
    export,  # noqa: F401
    labeling,  # noqa: F401
    predict,  # noqa: F401
    quick,  # noqa: F401
    scale,  # noqa: F401
    serve,  # noqa: F401
    step,  # noqa: F401
    studio,  # noqa: F401
    tuning,  # noqa: F401
)
