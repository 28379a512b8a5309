"""Several backbones as one: `--backbone dinov2-vit-s14+clip-vit-b16`.

Its features are those of the parts, each divided by its length, one after another. Weights files are given by part,
NAME=FILE,NAME=FILE; a part without a file comes from the hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finessl.errors import FinesslError
from finessl.models.encoder import Encoder

SIGN = "+"
PREFIXES = ("hf-hub:", "hf_hub:", "local-dir:")  # names of models outside timm may contain the sign


class Joint(Encoder):
    """Images in [0, 1] → concatenated unit features. Each part normalises and, where its size is another one, resizes the
    images as it expects them. A tuning strategy is inserted into each part."""

    def __init__(
        self, encoders: Sequence[Encoder], sizes: Sequence[int], means: Sequence[Sequence[float]],
        stds: Sequence[Sequence[float]],
    ) -> None:  # fmt: skip
        super().__init__(nn.Identity())
        self.encoders, self.sizes = nn.ModuleList(encoders), tuple(sizes)
        constants = torch.tensor([means, stds], dtype=torch.float32).view(2, len(encoders), 3, 1, 1)
        self.register_buffer("constants", constants, persistent=False)
        self.constants: Tensor

    def parts(self) -> list[Encoder]:
        return list(self.encoders)  # type: ignore[arg-type]

    def compile_with(self, wrap: Callable[[Any], Any]) -> None:
        for part in self.parts():
            part.compile_with(wrap)

    def forward(self, images: Tensor) -> Tensor:
        found = []
        for number, (encoder, size) in enumerate(zip(self.encoders, self.sizes, strict=True)):
            x = images.float()
            if size != images.shape[-1]:
                x = F.interpolate(x, (size, size), mode="bicubic", antialias=True, align_corners=False)
            mean, std = self.constants[:, number]
            found.append(F.normalize(encoder((x - mean) / std).float(), dim=1))
        return torch.cat(found, dim=1)


def part_names(name: str) -> list[str]:
    """The backbones that a name joins; one for an ordinary name."""
    if SIGN not in name or name.startswith(PREFIXES):
        return [name]
    parts = [part.strip() for part in name.split(SIGN)]
    if not all(parts) or len(set(parts)) < len(parts):
        raise FinesslError(f"backbone {name!r} should join different backbones, as dinov2-vit-s14+clip-vit-b16.")
    return parts


def weights_files(name: str, weights: str | Path | None) -> dict[str, str | None]:
    """The weights file of each part of a backbone, None for the hub's.   weights: FILE, or NAME=FILE,NAME=FILE of parts."""
    parts, text = part_names(name), None if weights is None else str(weights)
    if len(parts) == 1 or text is None:
        return dict.fromkeys(parts, text)
    names = "|".join(map(re.escape, parts))
    pieces = re.split(rf"(?:^|,)\s*({names})=", text)  # "", name, file, name, file …: a file may hold commas
    found: dict[str, str | None] = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    if pieces[0] or not found:
        raise FinesslError(f"weights {text!r} should read {','.join(f'{part}=FILE' for part in parts)}.")
    return {part: found.get(part) for part in parts}


def join_weights(files: dict[str, str]) -> str | None:
    """The inverse of `weights_files`; None if every part comes from the hub."""
    return ",".join(f"{name}={file}" for name, file in files.items()) or None
