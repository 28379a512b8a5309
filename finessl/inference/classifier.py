"""A trained classifier: what `finessl train` leaves in RUN/classifier, and what `finessl.load(RUN)` gives back.

classifier.safetensors    the trained parameters (the backbone's own weights are not copied)
classifier.json           classes, backbone, tuning, head, preprocessing
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import torch
from PIL import Image
from pydantic import AfterValidator, Field
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import TypedDict

from finessl.data.decoding import ImageError, decode, squash, to_bytes, to_rgb
from finessl.data.pixel_ops import upload
from finessl.errors import FinesslError
from finessl.models.backbones import create_backbone
from finessl.models.build import build_network, compile_encoder, store_frozen
from finessl.models.forward import forward_pixels
from finessl.models.joint import weights_files
from finessl.models.network import Network
from finessl.recipe import Choice, Recipe
from finessl.registry.plugins import load as load_plugins
from finessl.runs.directory import RESUMES
from finessl.runtime.device import resolve_device
from finessl.runtime.files import DamagedFile, read_json, replacing, sha256, write_json, writing
from finessl.runtime.fp8 import supports_fp8
from finessl.runtime.precision import resolve_precision

ImageLike = str | os.PathLike[str] | Image.Image | np.ndarray | Tensor
FORMAT = 1
TENSORS = "classifier.safetensors"
MAX_IMAGE_SIZE = 8_192  # pixels
MAX_OPTION = 65_536  # of a tuning strategy or head: lengths, ranks, widths
MIN_COMPILED = 500_000  # images from which compilation saves more time than it takes (docs/performance.md)

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def check_part(part: dict[str, Any]) -> dict[str, Any]:
    """A tuning strategy or head with its options. These give the sizes of tensors that are made before those of the
    file are loaded."""
    if not isinstance(part.get("name"), str):
        raise ValueError("it should have a name")
    for option, value in part.items():
        if isinstance(value, (int, float)) and not abs(value) <= MAX_OPTION:
            raise ValueError(f"{option} = {value} is out of range")
    return part


Part = Annotated[dict[str, Any], AfterValidator(check_part)]


class Description(TypedDict):
    """classifier.json."""

    format: int
    classes: Annotated[list[str], Field(min_length=2)]
    backbone: str
    weights: str | None
    weights_sha256: NotRequired[str]  # older classifiers do not have it
    pretrained: bool
    seed: NotRequired[Annotated[int, Field(ge=0)]]  # of weights that were drawn; older classifiers: 0
    tuning: Part
    head: Part
    aux: Literal["detached", "attached"] | None
    precision: NotRequired[Literal["auto", "fp32", "bf16", "fp16", "fp8"]]
    image_size: Annotated[int, Field(ge=1, le=MAX_IMAGE_SIZE)]
    mean: Annotated[list[Finite], Field(min_length=3, max_length=3)]
    std: Annotated[list[Positive], Field(min_length=3, max_length=3)]
    temperature: NotRequired[Positive]  # probabilities are softmax(logits / temperature); 1 where it is not there
    sha256: NotRequired[str]  # of classifier.safetensors; older classifiers do not have it


def describe(
    recipe: Recipe,
    classes: list[str],
    head: Choice,
    aux: Literal["detached", "attached"] | None,
    *,
    weights_sha256: str,
    image_size: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> Description:
    """classifier.json of a run of `recipe`.   head, aux: as exported.   weights_sha256: of the untuned backbone."""
    return {
        "format": FORMAT,
        "classes": classes,
        "backbone": recipe.model.backbone,
        "weights": recipe.model.weights,
        "weights_sha256": weights_sha256,
        "pretrained": recipe.model.pretrained,
        "seed": recipe.seed,
        "tuning": {"name": recipe.tuning.name, **recipe.tuning.options},
        "head": {"name": head.name, **head.options},
        "aux": aux,
        "precision": recipe.train.precision,
        "image_size": image_size,
        "mean": list(mean),
        "std": list(std),
    }


def write_classifier(folder: Path, description: Description, tensors: Mapping[str, Tensor]) -> None:
    """Write a description and its tensors, each file whole or not at all."""
    with writing(folder, RESUMES):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / TENSORS) as partial:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial)
        write_json(folder / "classifier.json", {**description, "sha256": sha256(folder / TENSORS)})


def read_classifier(folder: Path) -> tuple[Description, dict[str, Tensor]]:
    """What `write_classifier` wrote, verified. Nothing in the files is run."""
    description = read_json(folder / "classifier.json", Description)
    if description["format"] > FORMAT:
        raise FinesslError(f"{folder} was written by a newer finessl; update finessl to load it.")
    file = folder / TENSORS
    if description.get("sha256", same := sha256(file)) != same:
        raise DamagedFile(f"{file} is damaged: it is not the file that classifier.json describes.")
    try:
        tensors = load_tensors(file.read_bytes())  # load_file takes no path that is not UTF-8
    except (SafetensorError, OSError) as error:
        raise DamagedFile(f"{file} is damaged: {str(error).splitlines()[0]}.") from error
    if odd := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise DamagedFile(f"{file} is damaged: {odd[0]} holds values that are not finite.")
    return description, tensors


def load(
    run: str | Path,
    *,
    weights: str | Path | None = None,
    device: str = "auto",
    precision: str | None = None,
    plugins: Sequence[str] = (),
) -> Classifier:
    """The classifier of a finished run.

    run: its directory, or the classifier/ folder in it.   weights: the backbone's file, if it moved.   device: auto,
    cpu, cuda …   precision: fp32, bf16, fp16, fp8 or auto (bf16 where the device supports it); None: as the run had it,
    where the device can.   plugins: files or modules that register the run's tuning strategy or head; what a run
    directory names itself is never imported.
    """
    load_plugins(plugins)
    folder = Path(run)
    if not (folder / "classifier.json").exists():
        folder = folder / "classifier"
    if not (folder / "classifier.json").exists():
        hint = " That run has not finished; run its command again." if (Path(run) / "recipe.toml").exists() else ""
        raise FinesslError(f"{run} holds no classifier (classifier/classifier.json).{hint}")
    description, tensors = read_classifier(folder)
    file = weights or description["weights"]
    for part in weights_files(description["backbone"], file).values():
        if part is not None and not Path(part).exists():
            raise FinesslError(
                f"the backbone's weights, {part}, are not there; pass weights= (--weights) with their place."
            )
    backbone = create_backbone(
        description["backbone"],
        weights=file,
        image_size=description["image_size"],
        pretrained=description["pretrained"],
        seed=description.get("seed", 0),
    )
    wanted = description.get("weights_sha256")
    if wanted is not None and backbone.pretrained and backbone.sha256() != wanted:
        raise FinesslError(
            f"the backbone's weights ({file or description['backbone']}) are not those that {run} was trained with; "
            "pass weights= (--weights) with the right file."
        )
    tuning, head = dict(description["tuning"]), dict(description["head"])
    _, network = build_network(
        backbone,
        description["classes"],
        Choice(tuning.pop("name"), tuning),
        Choice(head.pop("name"), head),
        description["aux"],
        torch.Generator(),
    )
    network.load_trainable_state_dict(tensors)
    target = resolve_device(device)
    network.to(target).eval()
    return Classifier(network, dict(description), target, precision or usual_precision(description, target))


def usual_precision(description: Mapping[str, Any], device: torch.device) -> str:
    """The precision that the run had, where the device can; else auto."""
    precision = description.get("precision", "auto")
    impossible = device.type == "cpu" and precision in ("fp16", "fp8")
    return "auto" if impossible or (precision == "fp8" and not supports_fp8(device)) else precision


class Classifier:
    """Predicts classes of images given as paths, PIL images, arrays (h, w[, 3]) or tensors ([3, ]h, w). `load` makes one.

    description: of classifier.json.   precision: of the encoder: auto, fp32, bf16, fp16 or fp8.
    """

    def __init__(
        self, network: Network, description: dict[str, Any], device: torch.device, precision: str = "auto"
    ) -> None:
        self.network, self.description, self.device = network, description, device
        self.classes: list[str] = description["classes"]
        self.image_size: int = description["image_size"]
        self.temperature: float = description.get("temperature", 1.0)
        self.precision = resolve_precision(precision, device)
        store_frozen(network.encoder, self.precision)
        self.compiled = False

    def __repr__(self) -> str:
        return f"Classifier({len(self.classes)} classes, {self.description['backbone']}, {self.device})"

    def predict(self, images: ImageLike | Sequence[ImageLike]) -> list[str]:
        """The most probable class of each image."""
        return [self.classes[k] for k in self.predict_proba(images).argmax(1)]

    def predict_proba(self, images: ImageLike | Sequence[ImageLike]) -> np.ndarray:
        """Probabilities [n, classes], in the order of `.classes`."""
        return self._softmax(self.logits(images))

    def logits(self, images: ImageLike | Sequence[ImageLike]) -> np.ndarray:
        """The head's output [n, classes], before temperature and softmax."""
        return self._run(images, lambda network, x: network(x).logits.float(), len(self.classes))

    def embed(self, images: ImageLike | Sequence[ImageLike]) -> np.ndarray:
        """The tuned backbone's features [n, dim]."""
        return self._run(images, lambda network, x: network.features(x).float(), self.network.dim)

    def predict_and_embed(self, images: ImageLike | Sequence[ImageLike]) -> tuple[np.ndarray, np.ndarray]:
        """`predict_proba` and `embed` in one pass through the backbone."""

        def both(network: Network, x: Tensor) -> Tensor:
            features = network.features(x).float()
            return torch.cat([network.classify(features).logits.float(), features], dim=1)

        found = self._run(images, both, len(self.classes) + self.network.dim)
        return self._softmax(found[:, : len(self.classes)]), found[:, len(self.classes) :]

    def _softmax(self, logits: np.ndarray) -> np.ndarray:
        return (torch.from_numpy(logits) / self.temperature).softmax(1).numpy()

    def expect(self, images: int) -> None:
        """Compile the encoder if predicting `images` images repays the time that takes."""
        if self.device.type == "cuda" and images >= MIN_COMPILED and not self.compiled:
            compile_encoder(self.network.encoder)
            self.compiled = True

    @torch.no_grad()
    def _run(self, images: ImageLike | Sequence[ImageLike], function: Any, width: int) -> np.ndarray:
        images = as_list(images)
        self.expect(len(images))
        batch = 256 if self.device.type == "cuda" else 32
        results = [torch.empty((0, width))]
        for pixels in batches(images, self.image_size, batch):
            x = upload(pixels, self.device).permute(0, 3, 1, 2)
            if self.compiled and len(x) < batch:  # it was compiled for one shape
                x = torch.cat([x, x[-1:].expand(batch - len(x), -1, -1, -1)])
            mean, std = self.description["mean"], self.description["std"]
            found = forward_pixels(lambda images: function(self.network, images), x, mean, std, self.precision)
            results.append(found[: len(pixels)].cpu())
        return torch.cat(results).numpy()


def as_list(images: ImageLike | Iterable[ImageLike]) -> list[ImageLike]:
    """One image or many, as a list of images."""
    if isinstance(images, (str, os.PathLike, Image.Image)):
        return [images]
    if isinstance(images, (np.ndarray, Tensor)) and images.ndim <= 3:
        return [images]
    return list(images)  # type: ignore[arg-type]


def batches(images: Sequence[ImageLike], size: int, batch: int) -> Iterator[np.ndarray]:
    """uint8 [n, size, size, 3], each image squashed to the model's input as in evaluation."""
    for start in range(0, len(images), batch):
        yield np.stack(
            [squash(pixels(image, start + i, size), size) for i, image in enumerate(images[start : start + batch])]
        )


def pixels(image: ImageLike, position: int, size: int) -> np.ndarray:
    """Any kind of image as uint8 RGB [h, w, 3]; files that are larger than `size` squashed to it, as in evaluation."""
    if isinstance(image, (str, os.PathLike)):
        if os.path.isdir(image):
            raise FinesslError(
                f"{os.fspath(image)} is a folder; pass its files, for example sorted(Path(folder).rglob('*.jpg')), or "
                "run finessl predict RUN FOLDER."
            )
        try:
            return decode(image, square=size)
        except ImageError as error:
            raise ImageError(f"{os.fspath(image)}: {error}") from error
    if isinstance(image, Image.Image):
        return np.asarray(to_rgb(image))
    array = image.detach().cpu().numpy() if isinstance(image, Tensor) else np.asarray(image)
    if isinstance(image, Tensor) and array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3):
        raise FinesslError(
            f"image {position} has shape {tuple(array.shape)}; expected (h, w), (h, w, 3), or a tensor (3, h, w)."
        )
    return np.ascontiguousarray(np.broadcast_to(to_bytes(array, f"image {position}"), (*array.shape[:2], 3)))
