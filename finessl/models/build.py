"""A backbone, a tuning strategy and heads, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from finessl.models.backbones import Backbone
from finessl.models.heads import Start
from finessl.models.network import Network
from finessl.models.tuning import create
from finessl.models.tuning.base import Tuning
from finessl.recipe import Choice


def build_network(
    backbone: Backbone,
    classes: Sequence[str],
    tuning: Choice,
    head: Choice,
    aux: Literal["detached", "attached"] | None,
    generator: torch.Generator,
) -> tuple[Tuning, Network]:
    """The backbone tuned as asked, with heads; every random start comes from `generator`."""
    strategy = create(tuning.name, tuning.options)
    strategy.apply(backbone.encoder, generator)
    options = {name: value for name, value in head.options.items() if name not in Start.model_fields}
    return strategy, Network(backbone, classes, head=head.name, head_options=options, aux=aux, generator=generator)
