"""Pretrained weights from a local file: safetensors or PyTorch; key names of timm, OpenAI CLIP, open_clip or Hugging Face's
CLIP."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finessl.errors import FinesslError
from finessl.models.torchscript import read_torchscript


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pt/.pth/.bin or TorchScript file. Nothing in the file is executed."""
    path = Path(path)
    if not path.is_file():
        raise FinesslError(f"no weights file at {path}.")
    try:
        with open(path, "rb"):  # for a file without permission the libraries below give misleading reasons
            pass
        content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    except OSError as error:
        raise FinesslError(f"the weights file {path} cannot be read: {error.strerror or error}.") from error
    for wrapper in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, dict) else {}
    if not tensors:
        raise FinesslError(f"{path} holds no named tensors.")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not is_dense(tensor):
            raise FinesslError(f"{path}: {name} is no ordinary tensor with all its values in the file: refused.")
    return tensors


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is in memory, dense and no larger than its bytes. Otherwise a file can claim any size."""
    dense = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
    return dense and tensor.nbytes <= tensor.untyped_storage().nbytes()


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise FinesslError(f"{path} is not a complete safetensors file ({error}).") from error


def _read_torch(path: Path) -> Any:
    try:
        content = read_torchscript(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.load warns about damaged files
            return torch.load(path, map_location="cpu", weights_only=True) if content is None else content
    except FinesslError as error:
        raise FinesslError(
            f"{path} {error} Save its state_dict() as a safetensors file (safetensors.torch.save_file) where you trust it."
        ) from error
    except Exception as error:  # torch's unpickler raises anything on a damaged file: AssertionError, struct.error …
        first = str(error).splitlines()[0] if str(error) else "the file is cut short"
        if not isinstance(error, (RuntimeError, EOFError)):  # the other messages do not help a user
            first = "it is no PyTorch file, or holds more than tensors"
        raise FinesslError(
            f"{path} cannot be read as weights ({first}). Give a safetensors file, or a PyTorch file of tensors alone."
        ) from error


def take_projection(weights: dict[str, Tensor]) -> Tensor | None:
    """Remove CLIP's projection to the text space [dim, text dim] from `weights`, under any of its names, and return it."""
    for key, transposed in (
        ("visual_proj", False),
        ("visual.proj", False),
        ("visual_projection.weight", True),
        ("visual.head.proj.weight", True),
    ):
        if key in weights:
            projection = weights.pop(key).float()
            return projection.T.contiguous() if transposed else projection
    return None


def from_hugging_face_clip(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename `vision_model.…` keys to timm's and join the three attention matrices."""
    swaps = [
        ("embeddings.patch_embedding", "patch_embed.proj"),
        ("embeddings.position_embedding.weight", "pos_embed"),
        ("embeddings.class_embedding", "cls_token"),
        ("pre_layrnorm", "norm_pre"),  # the misspelling is Hugging Face's
        ("post_layernorm", "norm"),
        ("encoder.layers.", "blocks."),
        ("layer_norm", "norm"),
        ("self_attn.out_proj", "attn.proj"),
    ]
    converted: dict[str, Tensor] = {}
    for key, value in weights.items():
        if not key.startswith("vision_model.") or key.endswith("position_ids"):
            continue
        key = key.removeprefix("vision_model.")
        for theirs, ours in swaps:
            key = key.replace(theirs, ours)
        if key == "cls_token":
            value = value[None, None]
        elif key == "pos_embed":
            value = value[None]
        converted[key] = value
    for key in [k for k in converted if ".self_attn.q_proj." in k]:
        parts = [converted.pop(key.replace(".q_proj.", f".{p}_proj."), None) for p in "qkv"]
        if all(part is not None for part in parts):
            converted[key.replace("self_attn.q_proj", "attn.qkv")] = torch.cat([p for p in parts if p is not None])
    return converted


def load_weights(model: nn.Module, path: str | Path) -> Tensor | None:
    """Load a file into `model`. Returns CLIP's `visual_proj` if the file holds it. Position embeddings of another grid are
    resampled, the file's classifier is ignored; any other difference is an error."""
    weights = {k.removeprefix("module."): v for k, v in read_weights(path).items()}
    if any(f"{key}.scale" in weights for key in weights):
        raise FinesslError(f"{path} holds int8 weights with scales; unpack it to floats first.")
    projection = take_projection(weights)
    if any(key.startswith("vision_model.") for key in weights):
        weights = from_hugging_face_clip(weights)
    wanted = model.state_dict()
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        try:
            weights = convert(weights, model)
        except (RuntimeError, ValueError, AssertionError) as error:
            raise FinesslError(f"{path} does not fit {type(model).__name__}: {error}") from error
    classifier = {k for k in weights if re.match(r"(head|fc|classifier|head_dist)\.", k) and k not in wanted}
    given = {k: v for k, v in weights.items() if k not in classifier}
    check_fit(path, given, wanted, "model")
    model.load_state_dict(given, strict=False)
    return projection


def check_fit(path: str | Path, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    """Raise a FinesslError that lists the tensors that are missing in the file, unknown to the model, or of another shape.

    given: of the file.   wanted: of the model.   what: name of the model in the message.
    """
    missing = [k for k in wanted if k not in given and not k.endswith("num_batches_tracked")]
    unexpected = [k for k in given if k not in wanted]
    shapes = [
        f"{k} is {list(given[k].shape)} in the file, {list(v.shape)} in the {what}"
        for k, v in wanted.items()
        if k in given and given[k].shape != v.shape
    ]
    faults = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for what, names in (
            ("missing in the file", missing),
            (f"unknown to the {what}", unexpected),
            ("of another shape", shapes),
        )
        if names
    ]
    if faults:
        raise FinesslError(
            f"{path} does not fit the {what}, {len(wanted)} tensors: {'; '.join(faults)}. "
            "Check that the backbone is the one that these weights belong to."
        )
