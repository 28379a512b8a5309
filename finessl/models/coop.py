"""CoOp (Zhou et al., IJCV 2022, https://arxiv.org/abs/2109.01134): learned context vectors before each class name.

    t_k = text tower(context, name of class k)        logits = s · cos(f · P, t_k)

Only the context trains: `length` vectors shared by all classes. CLIP's text tower, its projection P of the image features
and its scale s are frozen. With vpt-deep there are prompts on both sides, with linear on the text side only. An exported
classifier holds t_k and P and needs no text tower (`ProjectedHead`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finessl.errors import FinesslError
from finessl.models.backbones import Backbone
from finessl.models.heads import Head, ProjectedHead
from finessl.models.text import PromptedNames, load_text_tower, projection_to
from finessl.registry.options import Choice, Count


class CoOpHead(Head):
    """length: number of context vectors.   context_init: initial words; their tokens replace `length` random vectors.
    learn_scale: train the scale s.   text_weights: file of the text tower (OpenAI's or open_clip's CLIP); None: the hub."""

    projection: Tensor  # P [dim, text dim]

    def __init__(
        self,
        backbone: Backbone,
        classes: Sequence[str],
        *,
        length: Count = 16,
        context_init: str | None = None,
        learn_scale: bool = False,
        text_weights: str | None = None,
    ) -> None:
        super().__init__()
        model, tokenizer = load_text_tower(
            backbone,
            needed_by="--head coop",
            instead="Give its weights in a file, --set head.text_weights=FILE (OpenAI's or open_clip's), or another head.",
            weights=text_weights,
        )
        with torch.no_grad():
            width = model.encode_text(tokenizer([""])).shape[1]
        self.register_buffer("projection", projection_to(width, backbone))
        self.names = PromptedNames(model, tokenizer, classes, words=context_init, length=length)
        self.context = nn.Parameter(torch.empty(self.names.length, self.names.embedded.shape[2]))
        self.scale = nn.Parameter(torch.tensor(self.names.scale), requires_grad=learn_scale)
        self._cached: tuple[tuple[int, int], Tensor] | None = None

    @classmethod
    def build(cls, backbone: Backbone, classes: Sequence[str], **options: Any) -> CoOpHead:
        return cls(backbone, classes, **options)

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None) -> None:
        """Embeddings of the initial words, or normal numbers with standard deviation 0.02."""
        random = torch.empty(self.context.shape).normal_(0, 0.02, generator=generator)
        self.context.copy_(random if self.names.initial is None else self.names.initial)

    def set(self, weight: Tensor) -> None:
        raise FinesslError(
            "the coop head has no class weights to start from, only words: leave out --head-init, and choose the words "
            'with --set head.context_init="a photo of a".'
        )

    def class_weights(self) -> Tensor:
        """t_k [C, text dim], unit rows. In evaluation they are computed once for all batches."""
        if self.training or torch.is_grad_enabled():
            return F.normalize(self.names(self.context), dim=1)
        state = (self.context.data_ptr(), self.context._version)
        if self._cached is None or self._cached[0] != state:
            self._cached = (state, F.normalize(self.names(self.context), dim=1))
        return self._cached[1]

    def train(self, mode: bool = True) -> CoOpHead:
        self._cached = None  # a CUDA graph changes the context without incrementing its version
        return super().train(mode)

    def forward(self, features: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(features @ self.projection, dim=-1), self.class_weights())

    @torch.no_grad()
    def exported(self, choice: Choice) -> tuple[Choice, Head]:
        weight, (dim, width) = self.class_weights(), self.projection.shape
        head = ProjectedHead(dim, len(weight), width=width).to(weight.device)
        for mine, its in ((weight, head.weight), (self.projection, head.projection), (self.scale, head.scale)):
            its.copy_(mine)
        return Choice("projected", {"width": width}), head
