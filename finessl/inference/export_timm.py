"""timm: merged weights in timm's own folder layout.

    timm.create_model("local-dir:DIR", pretrained=True)    # logits of the run, divided by its temperature

The layout is that of timm's hub: model.safetensors, config.json with label names and preprocessing, README.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import save_file
from timm.models._hub import load_model_config_from_hf, load_model_config_from_path
from torch import nn

from finessl.data.views import normalise
from finessl.errors import FinesslError
from finessl.inference.agreement import Logits
from finessl.inference.classifier import Classifier
from finessl.inference.export import Options, write_json
from finessl.inference.graph import merged, tuning_of
from finessl.inference.output import encoded
from finessl.models.aliases import alias_of
from finessl.models.backbones import HUB
from finessl.models.heads import LinearHead
from finessl.models.tuning import mergeable_strategies
from finessl.runtime.version import __version__

INSTEAD = "Use --format onnx or pt2, which hold every run."


def write(classifier: Classifier, folder: Path, options: Options) -> tuple[Logits, dict[str, Any]]:
    check(classifier)
    model = plain_model(classifier)
    architecture, arguments = architecture_of(classifier)
    tensors = {name: tensor.detach().float().contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(classifier, model, architecture, arguments)
    write_json(folder / "config.json", config)
    (folder / "README.md").write_bytes(encoded(read_me(classifier, architecture)))
    loaded = load_back(folder, tensors)

    @torch.no_grad()
    def logits(pixels: np.ndarray) -> np.ndarray:
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        outputs = loaded(normalise(images, classifier.description["mean"], classifier.description["std"]))
        return outputs.numpy() * classifier.temperature

    return logits, {"architecture": architecture}


def check(classifier: Classifier) -> None:
    """Refuse what a plain timm model cannot compute."""
    tuning, head = tuning_of(classifier), classifier.network.head
    if not tuning.mergeable:
        raise FinesslError(
            f"tuning {tuning.name} adds computation that a plain timm model does not have, so it cannot be merged into "
            f"its weights ({', '.join(mergeable_strategies())} can). {INSTEAD}"
        )
    if type(head) is not LinearHead:  # a subclass computes more
        raise FinesslError(
            f"the {classifier.description['head']['name']} head divides each image's features by their length, which "
            "timm's linear classifier cannot do. Train with --head linear for timm. "
            f"{INSTEAD}"
        )


def plain_model(classifier: Classifier) -> Any:
    """The timm model with its tuning merged and a linear classifier whose logits are divided by the temperature."""
    network = merged(classifier)
    model: Any = network.encoder.model
    backbone, head = classifier.description["backbone"], network.head
    if not hasattr(model, "reset_classifier"):
        raise FinesslError(f"{backbone} is not a model of timm's. {INSTEAD}")
    model.reset_classifier(len(classifier.classes))
    last = model.get_classifier()
    assert isinstance(head, LinearHead)
    if not isinstance(last, nn.Linear) or last.weight.shape != head.weight.shape:
        raise FinesslError(
            f"timm's {type(model).__name__} has no linear classifier on the {network.dim} features of {backbone}. {INSTEAD}"
        )
    with torch.no_grad():
        last.weight.copy_(head.weight / classifier.temperature)
        last.bias.copy_(head.bias / classifier.temperature)
    return model


def architecture_of(classifier: Classifier) -> tuple[str, dict[str, Any]]:
    """timm's name of the architecture, and the arguments that make the backbone of it."""
    name, size = classifier.description["backbone"], classifier.image_size
    if name == "embedded":
        described = json.loads((resources.files("finessl") / "assets" / "embedded.json").read_text())["vit"]
        arguments = {key: value for key, value in described.items() if key != "num_classes"}
        return "vit_tiny_patch16_224", {**arguments, "img_size": size}
    if name == "vit-small":
        return "vit_small_patch16_224", {"img_size": size, "patch_size": 2}
    timm_name = alias_of(name).timm
    if timm_name is None:
        raise FinesslError(f"{name} is not a model of timm's. {INSTEAD}")
    config = published_config(classifier.network.encoder.model)
    architecture, arguments = timm_name.partition(".")[0], {}
    if timm_name.startswith(HUB):
        source, _, place = timm_name.partition(":")
        load = load_model_config_from_path if source == "local-dir" else load_model_config_from_hf
        _, architecture, described = load(place)
        arguments = dict(described or {})
    if config.get("fixed_input_size"):
        arguments["img_size"] = size
    return architecture, arguments


def published_config(model: Any) -> dict[str, Any]:
    """timm's description of a model of its own; {} for one that was built without it."""
    config = getattr(model, "pretrained_cfg", None) or {}
    return dict(config) if isinstance(config, Mapping) else config.to_dict()


def config_of(classifier: Classifier, model: Any, architecture: str, arguments: dict[str, Any]) -> dict[str, Any]:
    about, size = classifier.description, classifier.image_size
    pool = getattr(model, "global_pool", None)
    return {
        "architecture": architecture,
        "num_classes": len(classifier.classes),
        "num_features": model.num_features,
        **({"global_pool": pool} if isinstance(pool, str) and pool else {}),
        "label_names": classifier.classes,
        **({"model_args": arguments} if arguments else {}),
        "pretrained_cfg": {
            "num_classes": len(classifier.classes),
            "input_size": [3, size, size],
            "fixed_input_size": "img_size" in arguments,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "squash",
            "mean": about["mean"],
            "std": about["std"],
            **{name: value for name, value in published_config(model).items() if name in ("first_conv", "classifier")},
        },
        "finessl": {"version": __version__, "temperature": classifier.temperature},
    }


def load_back(folder: Path, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """As a user of timm will; a tensor that the architecture has no place for is an error with its name."""
    try:
        empty: Any = timm.create_model(f"local-dir:{folder}", pretrained=False)
    except Exception as error:
        raise FinesslError(f"timm cannot build the exported model: {error}. {INSTEAD}") from error
    if odd := sorted(set(empty.state_dict()) ^ set(tensors)):
        raise FinesslError(
            f"timm's architecture has other tensors than the merged model ({', '.join(odd[:3])}"
            f"{', …' if len(odd) > 3 else ''}). {INSTEAD}"
        )
    try:
        return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except Exception as error:
        raise FinesslError(f"timm cannot load the exported model: {error}. {INSTEAD}") from error


def read_me(classifier: Classifier, architecture: str) -> str:
    """A model card in the layout of timm's hub. Its license is that of the backbone's weights, which are in the file."""
    tuning, names = classifier.description["tuning"]["name"], classifier.classes
    listed = "".join(f"- {json.dumps(name, ensure_ascii=False)}\n" for name in names)
    return f"""---
tags:
- image-classification
- timm
- finessl
pipeline_tag: image-classification
library_name: timm
license: other
license_name: same-as-the-backbone
---
# {architecture}: {len(names)} classes

Backbone {classifier.description["backbone"]}, tuned with finessl ({tuning}); the tuning is merged into the weights.

```python
import timm
from PIL import Image

model = timm.create_model("local-dir:.", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
probabilities = model(transform(Image.open("image.jpg").convert("RGB")).unsqueeze(0)).softmax(1)
label = model.pretrained_cfg["label_names"][probabilities.argmax()]
```

Classes, in the order of the outputs:

{listed}"""
