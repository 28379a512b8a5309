"""What a run is: every choice that decides its result, typed, checked, read from and written to TOML.

    [method]                                    Recipe.read("my.toml", {"method.alpha": 4.0, "train.steps": 2000})
    name = "finessl"
    alpha = 8.0            # what is not a field of the section is an option of the named method, strategy, split…

How a run is carried out (device, checkpoints, progress) is not part of it: see `training.loop.Settings`.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from finessl.errors import FinesslError
from finessl.registry import convert, nearest, options_of

# Fields that say where something is kept (and data.source, where it is a path). They are no part of a run's identity.
PLACES = ("data.root", "data.test", "source.labels", "model.weights", "head.text_features", "head.text_weights")


@dataclass(frozen=True)
class Choice:
    """A named thing (method, strategy, split, head) and its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataRecipe:
    source: str = ""  # folder, table, or the name of a data set
    root: str | None = None  # where a named data set lies
    test: str | None = None  # another folder or table with labeled images to test on
    image_size: int | None = None  # pixels at the model's input; the backbone's own size by default
    statistics: Literal["model", "dataset"] = "model"  # whose mean and std normalise the images
    weak: str = "crop-flip"
    strong: str = "randaugment"
    strong_views: int = 2
    labeled_in_unlabeled: bool = True  # the labeled images are also among the unlabeled ones
    strict: bool = False  # refuse broken images instead of skipping them


@dataclass(frozen=True)
class ModelRecipe:
    backbone: str = "clip-vit-b16"
    weights: str | None = None  # file with the backbone's weights; timm's hub otherwise
    pretrained: bool = True


@dataclass(frozen=True)
class TrainRecipe:
    steps: int = 15_000
    epoch_steps: int = 500  # what the paper calls an epoch: evaluation and the class pace follow it
    batch_size: int = 32  # labeled images a step, over all processes
    mu: int = 1  # unlabeled images per labeled one
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.03
    backbone_lr: float | None = None  # inside the backbone; `lr` by default, at most 1e-4 for tuning full and lp-ft
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    schedule: Literal["cosine", "cosine-epoch", "constant"] = "cosine"  # the released code steps once per epoch
    warmup: int = 0  # steps of linear warm-up
    clip_norm: float | None = None  # largest gradient norm
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"  # auto: bf16 where the chip multiplies it
    cache_features: int = 0  # draws of each view whose features are computed once (tuning linear); 0: new views always


@dataclass(frozen=True)
class Recipe:
    seed: int = 0
    data: DataRecipe = DataRecipe()
    source: Choice = Choice("auto")  # options of the data's source, whose kind is recognised
    split: Choice = Choice("auto")
    model: ModelRecipe = ModelRecipe()
    tuning: Choice = Choice("vpt-deep")
    head: Choice = Choice("cosine")
    method: Choice = Choice("finessl")
    train: TrainRecipe = TrainRecipe()

    # ---- in and out -------------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, file: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Recipe:
        """The defaults, then the TOML file, then `overrides` by dotted name (names before options: see `merge`)."""
        tree = cls().tree()
        if file is not None:
            merge(tree, read_toml(find_recipe(file)), str(file))
        for name, value in sorted((overrides or {}).items(), key=lambda item: not item[0].endswith(".name")):
            *path, last = name.split(".")
            merge(tree, {path[0]: {last: value}} if path else {last: value}, f"--set {name}")
        return cls.from_tree(tree)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Recipe:
        values: dict[str, Any] = {}
        hints = get_type_hints(cls)
        for name, value in tree.items():
            if name not in hints:
                raise FinesslError(
                    f"a recipe has no section {name!r}{nearest(name, hints) or '.'} Known: {', '.join(hints)}."
                )
            kind = hints[name]
            if kind is Choice:
                options = dict(value)
                values[name] = Choice(convert(options.pop("name"), str, f"{name}.name"), options)
            elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
                values[name] = section_from(kind, name, value)
            else:
                values[name] = convert(value, kind, name)
        recipe = cls(**values)
        recipe.check()
        return recipe

    def tree(self) -> dict[str, Any]:
        """Nested plain dicts, as in the TOML file."""
        tree: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Choice):
                tree[item.name] = {"name": value.name, **value.options}
            elif dataclasses.is_dataclass(value) and not isinstance(value, type):
                tree[item.name] = dataclasses.asdict(value)
            else:
                tree[item.name] = value
        return tree

    def toml(self) -> str:
        return write_toml(self.tree())

    def flat(self) -> dict[str, Any]:
        """Dotted name → value."""
        flat: dict[str, Any] = {}
        for section, value in self.tree().items():
            if isinstance(value, dict):
                flat |= {f"{section}.{key}": item for key, item in value.items()}
            else:
                flat[section] = value
        return flat

    def identity(self) -> dict[str, Any]:
        """Dotted name → value of what decides the result: `flat` without the places where data and weights are kept,
        whose content is verified by digests instead."""
        flat = self.flat()
        return {name: value for name, value in flat.items() if not is_place(name, value)}

    def differences(self, other: Recipe, *, places: bool = True) -> dict[str, tuple[Any, Any]]:
        """Dotted name → (value here, value there), where they differ. `places`: also where data and weights are kept."""
        mine, theirs = self.flat(), other.flat()
        names = list(mine | theirs) if places else list(self.identity() | other.identity())
        return {n: (mine.get(n), theirs.get(n)) for n in names if mine.get(n) != theirs.get(n)}

    # ---- sense ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        train, data = self.train, self.data
        for name, value, least in (
            ("train.steps", train.steps, 1),
            ("train.epoch_steps", train.epoch_steps, 1),
            ("train.batch_size", train.batch_size, 1),
            ("train.mu", train.mu, 1),
            ("train.warmup", train.warmup, 0),
            ("train.cache_features", train.cache_features, 0),
            ("data.strong_views", data.strong_views, 1),
            ("data.image_size", data.image_size or 8, 8),
            ("seed", self.seed, 0),
        ):
            if value < least:
                raise FinesslError(f"{name} = {value} should be at least {least}.")
        for name, number in (("train.lr", train.lr), ("train.backbone_lr", train.backbone_lr or 1.0)):
            if not 0 < number < float("inf"):
                raise FinesslError(f"{name} = {number} should be a positive number.")
        if train.weight_decay < 0 or not 0 <= train.momentum < 1:
            raise FinesslError(
                f"train.weight_decay = {train.weight_decay} should not be negative and "
                f"train.momentum = {train.momentum} should lie in [0, 1)."
            )
        if train.cache_features and self.tuning.name != "linear":
            raise FinesslError(
                f"train.cache_features = {train.cache_features} needs a frozen backbone, and tuning "
                f"{self.tuning.name!r} trains inside it: use --tuning linear, or --cache-features 0."
            )


def is_place(name: str, value: Any) -> bool:
    """Does this field say where something is kept, and not what it is? The name of a known data set is no place."""
    if name == "data.source":
        from finessl.data.sources import NAMED

        return str(value) not in NAMED and not str(value).startswith("hf:")
    return name in PLACES


def section_from(kind: type, section: str, values: Mapping[str, Any]) -> Any:
    if not isinstance(values, Mapping):
        raise FinesslError(f"{section} = {values!r} should be a section, [{section}], with fields of its own.")
    hints = get_type_hints(kind)
    for name in values:
        if name not in hints:
            raise FinesslError(
                f"[{section}] has no field {name!r}{nearest(name, hints) or '.'} Known: {', '.join(hints)}."
            )
    return kind(**{name: convert(value, hints[name], f"{section}.{name}") for name, value in values.items()})


def merge(tree: dict[str, Any], changes: Mapping[str, Any], origin: str) -> None:
    """Lay `changes` over `tree`, a section at a time. Naming another method (strategy…) drops the old one's options; of
    a split's, how many labels a class has stays where the other split takes it too."""
    for section, value in changes.items():
        if section not in tree:
            raise FinesslError(f"{origin}: a recipe has no section {section!r}{nearest(section, tree) or '.'} "
                               f"Known: {', '.join(tree)}; a field is written section.field=value.")  # fmt: skip
        if isinstance(tree[section], dict):
            if not isinstance(value, Mapping):
                raise FinesslError(f"{origin}: {section} is a section; set one of its fields, {section}.… = {value!r}.")
            if "name" in value and value["name"] != tree[section].get("name"):
                tree[section] = label_count(tree[section], value["name"]) if section == "split" else {}
            tree[section] = {**tree[section], **value}
        else:
            tree[section] = value


def label_count(split: Mapping[str, Any], other: Any) -> dict[str, Any]:
    """`labels_per_class` of a split, if the split named `other` takes it."""
    from finessl.data.splits import SPLITS

    known = isinstance(other, str) and other in SPLITS
    takes = other == "auto" or (known and "labels_per_class" in options_of(SPLITS[other]))
    return {name: value for name, value in split.items() if takes and name == "labels_per_class"}


def parse_setting(text: str) -> tuple[str, Any]:
    """'method.alpha=4' → ('method.alpha', 4); a value that is not TOML is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise FinesslError(f"--set {text!r} should read section.field=value, for example --set method.alpha=4.")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value


def recipe_folder() -> Path:
    """Where the shipped recipes lie: inside an installed package, beside it in a checkout."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "recipes"


def find_recipe(name: str | Path) -> Path:
    """A recipe file, or the name of one that is shipped (with or without .toml)."""
    for path in (Path(name), recipe_folder() / f"{name}.toml", recipe_folder() / name):
        if path.is_file():
            return path
    shipped = [path.stem for path in sorted(recipe_folder().glob("*.toml"))]
    raise FinesslError(
        f"no recipe file {str(name)!r}{nearest(str(name), shipped) or '.'} Shipped recipes: {', '.join(shipped) or 'none'}."
    )


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))  # paths of other encodings
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FinesslError(f"{path} is not valid TOML: {error}.") from error


def write_toml(tree: Mapping[str, Any]) -> str:
    """Plain values, then one table per section: all that a recipe needs (the standard library reads TOML only)."""
    lines = [f"{key} = {toml_value(value)}" for key, value in tree.items() if not isinstance(value, Mapping)]
    for section, values in tree.items():
        if isinstance(values, Mapping):
            lines += ["", f"[{section}]"]
            lines += [f"{key} = {toml_value(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # TOML's basic strings escape as JSON's do
    return repr(value)
