"""The optimizers, PyTorch's own."""

from __future__ import annotations

from typing import Any

import torch

from finessl.models.network import Network
from finessl.recipe import TrainRecipe
from finessl.runtime.startup import stand_in


class WithoutCompiler:
    """Methods of an optimizer that would import PyTorch's compiler (runtime/startup.py says why they need not)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        with stand_in():
            super().__init__(*arguments, **options)

    def step(self, *arguments: Any, **options: Any) -> Any:
        with stand_in():
            return super().step(*arguments, **options)  # type: ignore[misc]

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        with stand_in():
            super().zero_grad(*arguments, **options)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        with stand_in():
            return super().state_dict()  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with stand_in():
            super().load_state_dict(state_dict)  # type: ignore[misc]


class SGD(WithoutCompiler, torch.optim.SGD):
    pass


class AdamW(WithoutCompiler, torch.optim.AdamW):
    pass


def make_optimizer(network: Network, train: TrainRecipe, device: torch.device) -> torch.optim.Optimizer:
    groups = network.parameter_groups(lr=train.lr, weight_decay=train.weight_decay, backbone_lr=train.backbone_lr)
    for group in groups:
        group["initial_lr"] = group["lr"]
    gpu = device.type == "cuda"
    if gpu:  # a tensor on the device: a captured step reads the rate from it
        for group in groups:
            group["lr"] = torch.tensor(group["initial_lr"], device=device)
    if train.optimizer == "sgd":
        return SGD(groups, lr=train.lr, momentum=train.momentum, nesterov=train.nesterov, fused=gpu)
    return AdamW(groups, lr=train.lr, fused=gpu, capturable=gpu)
