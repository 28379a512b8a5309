"""A backbone with a main head and, if the method needs one, an auxiliary head."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from timm.layers import PatchDropout
from torch import Tensor, nn

from finessl.errors import FinesslError
from finessl.methods.base import HeadOutputs
from finessl.models.backbones import Backbone
from finessl.models.heads import HEADS, Head
from finessl.registry.options import Choice, check_options


class Network(nn.Module):
    """Encoder and heads. Apply the tuning strategy to the encoder first: parameters that require a gradient when the network
    is built are the trained ones.

    classes: their names.   head, head_options: an entry of HEADS and its options.   aux: the auxiliary head, a copy of the
    main one with its own scale; its loss reaches the encoder ("attached") or does not ("detached"); None: no such head.
    generator: of random initial weights.
    """

    def __init__(
        self,
        backbone: Backbone,
        classes: Sequence[str],
        *,
        head: str = "cosine",
        head_options: Mapping[str, Any] | None = None,
        aux: Literal["detached", "attached"] | None = "detached",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if len(classes) < 2:
            raise FinesslError(f"a classifier needs at least two classes, not {len(classes)}.")
        options = check_options("head", head, HEADS[head], head_options or {})
        self.dim = backbone.dim
        self.encoder = backbone.encoder
        self.head: Head = HEADS[head].build(backbone, classes, **options)
        self.head.reset(generator)
        self.aux = copy.deepcopy(self.head) if aux else None
        self.detach_aux = aux == "detached"
        self._trained = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        self._buffers_trained = list(self.encoder.trainable_buffers())
        self._initial: dict[str, Tensor] = {}
        self._remember()

    def features(self, images: Tensor) -> Tensor:
        """Features [n, dim] of images [n, 3, S, S]. Input of two dimensions is taken to be cached features and returned."""
        return images if images.ndim == 2 else self.encoder(images)

    def classify(self, features: Tensor) -> HeadOutputs:
        """Logits of both heads, in float32 or better: a softmax over many classes needs more than half precision."""
        if features.dtype in (torch.float16, torch.bfloat16):
            features = features.float()
        with torch.autocast(features.device.type, enabled=False):
            logits = self.head(features)
            if self.aux is None:
                return HeadOutputs(logits, None)
            return HeadOutputs(logits, self.aux(features.detach() if self.detach_aux else features))

    def forward(self, images: Tensor) -> HeadOutputs:
        return self.classify(self.features(images))

    def set_head(self, weight: Tensor) -> None:
        """Set the initial weights of both heads (head_init.py)."""
        for head in (self.head, self.aux):
            if head is not None:
                head.set(weight)
        self._remember()

    def trained(self) -> dict[str, nn.Parameter]:
        """Name → parameter of all parameters that train at some time."""
        parameters = dict(self.named_parameters())
        return {name: parameters[name] for name in self._trained}

    def trainable_buffers(self) -> dict[str, Tensor]:
        """Name → running statistic that training changes (BatchNorm)."""
        buffers = dict(self.encoder.named_buffers())
        return {f"encoder.{name}": buffers[name] for name in self._buffers_trained}

    def trainable_state_dict(self) -> dict[str, Tensor]:
        """The network's part of a checkpoint: trained parameters and trainable buffers."""
        return {**self.trained(), **self.trainable_buffers()}

    def exported(self, choice: Choice) -> tuple[Choice, dict[str, Tensor]]:
        """The content of an exported classifier: name and options of its head, and tensors for
        `load_trainable_state_dict`.   choice: name and options of the trained head."""
        tensors = {name: tensor for name, tensor in self.trainable_state_dict().items() if name.startswith("encoder.")}
        result = choice
        for side, head in (("head", self.head), ("aux", self.aux)):
            if head is not None:
                result, module = head.exported(choice)
                tensors |= {f"{side}.{name}": p for name, p in module.named_parameters() if p.requires_grad}
        return result, tensors

    @torch.no_grad()
    def load_trainable_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `trainable_state_dict`. A FinesslError names tensors that are missing, unknown or of another shape."""
        mine = self.trainable_state_dict()
        wrong = [
            n for n in {**mine, **tensors} if n not in mine or n not in tensors or mine[n].shape != tensors[n].shape
        ]
        if wrong:
            raise FinesslError(f"these trained parameters belong to another model: {', '.join(wrong[:5])} do not fit.")
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])

    @property
    def random(self) -> bool:
        """Whether the forward pass uses random numbers (dropout)."""
        return any(m.training and m.prob > 0 for m in self.modules() if isinstance(m, PatchDropout)) or any(
            module.training for module in self.dropouts()
        )

    def dropouts(self) -> list[nn.Dropout]:
        """The modules that drop something in training mode."""
        return [module for module in self.modules() if isinstance(module, nn.Dropout) and module.p > 0]

    def count(self) -> tuple[int, int]:
        """Number of trained parameters, number of all parameters."""
        trained = sum(parameter.numel() for parameter in self.trained().values())
        return trained, sum(parameter.numel() for parameter in self.parameters())

    def parameter_groups(
        self, *, lr: float, weight_decay: float, backbone_lr: float | None = None
    ) -> list[dict[str, Any]]:
        """Optimizer groups "backbone" and "heads"; an empty group is left out. Parameters that a strategy has marked
        `no_weight_decay` have a group of their own.   backbone_lr: None: as `lr`."""
        rates = {"backbone": lr if backbone_lr is None else backbone_lr, "heads": lr}
        groups: dict[tuple[str, bool], list[nn.Parameter]] = {
            (side, decays): [] for side in rates for decays in (True, False)
        }
        for name, parameter in self.trained().items():
            side = "backbone" if name.startswith("encoder.") else "heads"
            groups[side, not getattr(parameter, "no_weight_decay", False)].append(parameter)
        return [
            {"name": side, "params": parameters, "lr": rates[side], "weight_decay": weight_decay if decays else 0.0}
            for (side, decays), parameters in groups.items()
            if parameters
        ]

    def reset(self) -> None:
        """Restore the initial values of trained parameters and trainable buffers (heads: as of the last `set_head`)."""
        with torch.no_grad():
            for name, tensor in self.trainable_state_dict().items():
                tensor.copy_(self._initial[name])

    def _remember(self) -> None:
        for name, tensor in {**self.trained(), **self.trainable_buffers()}.items():
            if not name.startswith("encoder.") or name not in self._initial:
                self._initial[name] = tensor.detach().to("cpu", copy=True)
