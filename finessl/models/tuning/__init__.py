"""Tuning strategies: which parameters of the backbone train. One file per strategy. `finessl list tunings`"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from finessl.errors import FinesslError
from finessl.registry import Registry, nearest
from finessl.registry.options import check_options, options_of

if TYPE_CHECKING:
    from finessl.models.tuning.base import Tuning

_HERE = "finessl.models.tuning"
TUNINGS = Registry(
    "tuning",
    {
        "vpt-deep": (f"{_HERE}.vpt:DeepPrompts", "visual prompts at every layer, the paper's default"),
        "vpt-shallow": (f"{_HERE}.vpt:ShallowPrompts", "visual prompts at the first layer"),
        "lora": (f"{_HERE}.lora:LoRA", "low-rank change of the query and value matrices"),
        "adapter": (f"{_HERE}.adapter:Adapter", "bottleneck after each MLP"),
        "adaptformer": (f"{_HERE}.adaptformer:AdaptFormer", "bottleneck in parallel to each MLP"),
        "ssf": (f"{_HERE}.ssf:ScaleShift", "scale and shift of the features"),
        "bitfit": (f"{_HERE}.bitfit:BitFit", "the biases"),
        "norm": (f"{_HERE}.norm:Norm", "the weights and biases of the norms"),
        "bn": (f"{_HERE}.bn:BatchNorms", "the BatchNorms of a convolutional network"),
        "linear": (f"{_HERE}.linear:Linear", "linear probing (LP): the heads alone"),
        "full": (f"{_HERE}.full:Full", "full fine-tuning (FFT): every weight"),
        "lp-ft": (f"{_HERE}.lp_ft:ProbeThenFull", "linear probing first, then full fine-tuning"),
    },
)


def create(spec: str, options: Mapping[str, Any] | None = None) -> Tuning:
    """A tuning strategy.   spec: its name, or several names joined by "+".   options: as in a recipe's [tuning]."""
    from finessl.models.tuning.base import Composed

    parts = [
        cls(**check_options("tuning", name, cls, chosen))
        for name, (cls, chosen) in resolve(spec, options or {}).items()
    ]
    return parts[0] if len(parts) == 1 else Composed(parts)


def keeps_blocks_frozen(spec: str) -> bool:
    """Whether the strategies, joined by "+", leave the weights of a transformer's blocks as they are (models/fused_vit.py)."""
    return all(name.strip() in ("vpt-deep", "vpt-shallow", "adaptformer", "linear") for name in spec.split("+"))


def resolve(spec: str, options: Mapping[str, Any]) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Strategy → (class, its options). "strategy.option" names the strategy of an option; it is required if several of the
    joined strategies have the option."""
    names = [name.strip() for name in spec.split("+")]
    if len(set(names)) < len(names):
        raise FinesslError(f"tuning {spec!r} names a strategy twice.")
    classes = {name: TUNINGS[name] for name in names}
    chosen: dict[str, dict[str, Any]] = {name: {} for name in names}
    for option, value in options.items():
        owner, _, bare = option.rpartition(".")
        takers = [owner] if owner else [name for name in names if bare in options_of(classes[name])]
        if len(takers) > 1:
            forms = " or ".join(f"{name}.{bare}" for name in takers)
            raise FinesslError(f"tuning {spec!r}: more than one part takes the option {bare!r}; write {forms}.")
        if takers and takers[0] not in chosen:
            raise FinesslError(
                f"tuning {spec!r} has no part {owner!r} (option {option!r}){nearest(owner, names) or '.'}"
            )
        chosen[takers[0] if takers else names[0]][bare] = value
    return {name: (cls, chosen[name]) for name, cls in classes.items()}


def mergeable_strategies() -> list[str]:
    """Names of the strategies whose result an ordinary timm model can hold."""
    return [name for name in TUNINGS.names() if TUNINGS[name].mergeable]
