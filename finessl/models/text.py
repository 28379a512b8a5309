"""CLIP's text towers, from open_clip: features of class names (`--head-init text`), and of class names after learned
context vectors (`--head coop`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finessl.errors import FinesslError
from finessl.models.aliases import BACKBONES, alias_of
from finessl.models.backbones import Backbone, unreachable
from finessl.models.weights import check_fit, read_weights

SIZES = ("input_resolution", "context_length", "vocab_size")  # entries of OpenAI's files that are not weights


def load_text_tower(
    backbone: Backbone, *, needed_by: str, instead: str, weights: str | Path | None = None
) -> tuple[Any, Any]:
    """open_clip's model and tokenizer, with the text tower that belongs to `backbone`.

    needed_by: the option that error messages name.   instead: advice if the hub cannot be reached.   weights: a local file;
    None: the hub.
    """
    alias = alias_of(backbone.name)
    if alias.text is None:
        able = ", ".join(name for name, entry in BACKBONES.items() if entry.text)
        raise FinesslError(f"{backbone.name} has no text tower; {needed_by} works with {able}.")
    name, tag = alias.text
    try:
        import open_clip

        model = from_hub(open_clip, name, tag) if weights is None else without_weights(open_clip, name)
        tokenizer = open_clip.get_tokenizer(name)
    except ImportError as error:  # SigLIP's tokenizer needs more than open_clip
        package = "'finessl[text]'" if error.name == "open_clip" else error.name
        raise FinesslError(f"{needed_by} needs {error.name}: pip install {package}.") from error
    except Exception as error:  # the hub's clients raise unrelated types
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FinesslError(f"the text tower {name} ({tag}) could not be loaded ({first}). {instead}") from error
    if weights is not None:
        given = {k.removeprefix("module."): v.float() for k, v in read_weights(weights).items()}
        given = {k: v for k, v in given.items() if not k.startswith("visual.") and k not in SIZES}
        wanted = {k: v for k, v in model.state_dict().items() if not k.startswith("visual.")}
        check_fit(weights, given, wanted, f"text tower {name}")
        model.load_state_dict(given, strict=False)
    return model.eval(), tokenizer


def from_hub(open_clip: Any, name: str, tag: str) -> Any:
    repository = (open_clip.get_pretrained_cfg(name, tag).get("hf_hub") or "").strip("/")
    reason = repository and unreachable(repository, "open_clip_model.safetensors", "open_clip_pytorch_model.bin")
    if reason:  # fail at once, not after the client's retries
        raise OSError(reason)
    return open_clip.create_model(name, pretrained=tag)


def without_weights(open_clip: Any, name: str) -> Any:
    config = open_clip.get_model_config(name)
    kind = open_clip.CustomTextCLIP if config.pop("custom_text", False) else open_clip.CLIP
    return kind(**config)


def spoken(label: str) -> str:
    """A class name as words."""
    return label.replace("_", " ")


def projection_to(width: int, backbone: Backbone) -> Tensor:
    """[dim, width]: projection of the backbone's features to the text space; the identity if they are in it already (SigLIP,
    CLIP's ResNets).   width: dimensions of the text features."""
    projection = backbone.visual_proj
    if projection is None:
        if width != backbone.dim:
            raise FinesslError(
                f"the text features have {width} numbers, {backbone.name}'s features {backbone.dim}, and its weights "
                "carry no visual_proj that maps one to the other. Use weights that do, or another head (start)."
            )
        return torch.eye(width)
    if width != projection.shape[1]:
        raise FinesslError(
            f"the text features have {width} numbers, but {backbone.name} projects to {projection.shape[1]}."
        )
    return projection.float()


class PromptedNames(nn.Module):
    """A frozen text tower and class names: context vectors in, one feature per class out.

        [start] context … name of class k . [end]   →   t_k

    deepcopy returns the same object: heads share the tower.
    """

    embedded: Tensor  # [C, L, width] embeddings of the tokens; those in the context's slot are never used
    tokens: Tensor  # [C, L]; the tower finds the end of a text in them

    def __init__(self, model: Any, tokenizer: Any, classes: Sequence[str], *, words: str | None, length: int) -> None:
        """model, tokenizer: from load_text_tower.   classes: their names.   words: initial context, which then has one vector
        per token.   length: number of context vectors without `words`."""
        super().__init__()
        part = getattr(model, "text", model)  # CLIP's text tower is the model itself; later models have an attribute
        empty, named = tokenizer([""]), tokenizer([f"{spoken(name)}." for name in classes])
        self.start = int((named[0] != empty[0]).nonzero()[0])  # after the start token, if there is one
        self.initial: Tensor | None = None
        if words is not None:
            written = tokenizer([words])[0, self.start :]
            length = int((written == empty[0, self.start]).nonzero()[0])
            self.initial = part.token_embedding(written[:length]).detach()
        self.length, room = length, named.shape[1] - length
        if self.length < 1:
            raise FinesslError(f"head coop: a context of {length} vectors ({words!r}) should have at least 1.")
        long = [name for name, row in zip(classes, named, strict=True) if (row[max(room, 1) :] != empty[0, -1]).any()]
        if room < 1 or long:
            raise FinesslError(
                f"head coop: {length} context vectors and the class {(long or classes)[0]!r} do not fit in the text "
                f"tower's {named.shape[1]} tokens; choose a smaller head.length."
            )
        slot = named[:, self.start, None].expand(-1, length)  # any token but the end token
        tokens = torch.cat([named[:, : self.start], slot, named[:, self.start : room]], 1)
        if getattr(model, "attn_mask", None) is not None:  # causal: tokens after the longest text have no effect
            end = int((tokens != empty[0, -1]).any(0).nonzero()[-1]) + 1
            tokens = tokens[:, :end]
            model.positional_embedding = nn.Parameter(model.positional_embedding[:end].clone())
            model.attn_mask = model.attn_mask[:end, :end].clone()
        self.register_buffer("tokens", tokens)
        self.register_buffer("embedded", part.token_embedding(tokens).detach())
        self.scale = model.logit_scale.exp().item()
        del model.visual
        part.token_embedding = nn.Identity()  # replaces 50,000 rows; `forward` hooks it
        self.model, self.embedding = model, part.token_embedding
        self.requires_grad_(False).eval()

    def forward(self, context: Tensor) -> Tensor:
        """[C, text dim]: open_clip's encode_text on embeddings that contain `context`."""
        head, tail = self.embedded[:, : self.start], self.embedded[:, self.start + self.length :]
        prompts = torch.cat([head, context.expand(len(head), -1, -1), tail], 1)
        with self.embedding.register_forward_hook(lambda *_: prompts):
            return self.model.encode_text(self.tokens)

    def train(self, mode: bool = True) -> PromptedNames:
        return super().train(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptedNames:
        return self
