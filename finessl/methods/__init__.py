"""Semi-supervised methods, one file each. `METHODS` lists them; `create` builds one from a recipe's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from finessl.registry import Registry
from finessl.registry.options import check_options

if TYPE_CHECKING:  # torch is imported only when a method is made
    from finessl.methods.base import Method, Task

METHODS = Registry(
    "method",
    {
        "finessl": ("finessl.methods.finessl:FineSSL", "balanced margin softmax and decoupled label smoothing (2024)"),
        "supervised": ("finessl.methods.supervised:Supervised", "cross-entropy on the labeled images only"),
        "pseudo-label": ("finessl.methods.pseudo_label:PseudoLabel", "the model's confident labels as targets (2013)"),
        "fixmatch": ("finessl.methods.fixmatch:FixMatch", "confident weak-view labels for the strong view (2020)"),
        "flexmatch": ("finessl.methods.flexmatch:FlexMatch", "thresholds by class learning pace (2021)"),
        "freematch": ("finessl.methods.freematch:FreeMatch", "self-adaptive thresholds and fairness (2023)"),
        "softmatch": ("finessl.methods.softmatch:SoftMatch", "Gaussian weights instead of a threshold (2023)"),
        "debiaspl": ("finessl.methods.debiaspl:DebiasPL", "pseudo-labels and logits debiased by their mean (2022)"),
        "fpl": ("finessl.methods.fpl:FPL", "self-training on the top 16 images per class, once (2023)"),
        "ifpl": ("finessl.methods.ifpl:IFPL", "FPL repeated ten times with new pseudo-labels (2023)"),
        "grip": ("finessl.methods.grip:GRIP", "FPL repeated with more and more pseudo-labels (2023)"),
    },
)


def create(name: str, task: Task, options: Mapping[str, Any] | None = None) -> Method:
    """The method `name` for `task`.   options: as in a recipe's [method]. A FinesslError names every mistake in them."""
    method = METHODS[name]
    return method(task, **check_options("method", name, method, options or {}))
