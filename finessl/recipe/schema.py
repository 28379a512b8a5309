"""What a run is: every choice that decides its result, typed, checked, read from and written to TOML.

    [method]                                    Recipe.read("my.toml", {"method.alpha": 4.0, "train.steps": 2000})
    name = "finessl"
    alpha = 8.0            # what is not a field of the section is an option of the named method, strategy, split…

    [data.strong]          # a view with options; also strong = "randaugment(ops=3)" or --set data.strong.ops=3
    name = "randaugment"
    ops = 3

A file may begin with `extends = "released"`: the shipped recipe is read first, then what the file changes. A name that
ends in .toml is a file, relative to the one that extends it; a list lays several over each other, in its order.

TOML has no null: the word "none" leaves an optional value out (`aux_threshold = "none"`).

A recipe that is going to be trained is checked completely (`check=True`): every name, and every option of what is named.
All mistakes are reported at once. The recipe of a finished run is read for its fields alone (`check=False`): a report
needs no plug-in, and runs none. How a run is carried out (device, checkpoints, progress) is not part of a recipe: see
`training.settings.Settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field

from finessl.errors import FinesslError
from finessl.recipe.files import read_layers, read_toml
from finessl.recipe.merge import VIEWS, merge_all, no_section, override_all, read_choice, read_section
from finessl.registry import plugins
from finessl.registry.options import Choice, Count, Options, find_mistakes, parse, plain

FORMAT = 2  # of a saved recipe. 1, without this number: FlexMatch's `warmup` was true, labels_per_class always held
STEP_LIMIT = 2**40  # bytes of images in one step that no machine holds
# Fields that say where something is kept (and data.source, where it is a path). They are no part of a run's identity.
PLACES = ("data.root", "data.test", "source.labels", "model.weights", "head.text_features", "head.text_weights")

Steps = Annotated[int, Field(ge=1, le=10**9)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


def declare(default: Any, help: str, *, unset: str = "", short: str | None = None) -> Any:
    """A field, with what `finessl --help`, `finessl list fields` and the documentation say of it.

    default: its value where nothing is given.   help: what it is, and its unit.   unset: in words, what None means.
    short: its name on the command line and in `finessl.train`; a field without one is set by its dotted name.
    """
    return Field(default, description=help, json_schema_extra={"unset": unset, "short": short})


class DataRecipe(Options):
    source: str = declare("", "Folder, table, or the name of a data set.")
    root: str | None = declare(None, "Folder containing the named data set.", short="root")
    test: str | None = declare(None, "Folder or table of labeled images to test on.", short="test")
    development: Annotated[int, Field(ge=0)] = declare(
        0, "Training images to hold out, evenly over the classes, and to test on in place of the test images: settings "
        "are chosen on these."
    )  # fmt: skip
    image_size: Annotated[int, Field(ge=8, le=8192)] | None = declare(
        None, "Side of the network's input, in pixels.", unset="the backbone's own", short="image_size"
    )
    statistics: Literal["model", "dataset"] = declare("model", "Whose mean and deviation normalise the images.")
    weak: Choice = declare(Choice("crop-flip"), "Weak view (finessl list weak-views).")
    strong: Choice = declare(Choice("randaugment"), "Strong view (finessl list strong-views).")
    strong_views: Annotated[int, Field(ge=1, le=100)] = declare(
        2, "Strong views per unlabeled image.", short="strong_views"
    )
    labeled_in_unlabeled: bool | None = declare(
        None, "Use the labeled images as unlabeled ones, too.", unset="as the method has it"
    )
    strict: bool = declare(False, "Refuse broken images instead of skipping them.", short="strict")


class ModelRecipe(Options):
    backbone: str = declare("clip-vit-b16", "Backbone (finessl list backbones), or any timm name.", short="backbone")
    weights: str | None = declare(
        None, "File with the backbone's weights (safetensors or pt; timm, OpenAI or Hugging Face keys). Where train "
        "plans the run: NAME=FILE,NAME=FILE.",
        unset="timm's hub", short="weights",
    )  # fmt: skip
    pretrained: bool = declare(True, "Start from pre-trained weights; false: from random ones.")


class TrainRecipe(Options):
    steps: Steps = declare(15_000, "Training steps.", short="steps")
    epoch_steps: Steps = declare(500, "Steps per epoch; schedules and FineSSL's class pace follow it.")
    batch_size: Count = declare(32, "Labeled images per step, over all processes.", short="batch_size")
    mu: Count = declare(1, "Unlabeled images per labeled image.", short="mu")
    optimizer: Literal["sgd", "adamw"] = declare("sgd", "Optimizer.")
    lr: Positive = declare(0.03, "Learning rate.", short="lr")
    backbone_lr: Positive | None = declare(
        None,
        "Learning rate inside the backbone.",
        unset="lr; at most 1e-4 for tuning full and lp-ft",
        short="backbone_lr",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = declare(0.9, "Momentum of SGD.")
    nesterov: bool = declare(False, "Nesterov's momentum.")
    weight_decay: NotNegative = declare(5e-4, "Weight decay.")
    schedule: Literal["cosine", "cosine-epoch", "cosine-fixmatch", "constant"] = declare(
        "cosine", "Learning-rate schedule. cosine-epoch: one value per epoch; cosine-fixmatch: cos(7π/16 · t)."
    )
    warmup: Annotated[int, Field(ge=0, le=10**9)] = declare(0, "Steps of linear warm-up.")
    clip_norm: Positive | None = declare(None, "Maximum norm of the gradient.", unset="no limit")
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = declare(
        "auto", "Number format. auto: bf16 where the device supports it; fp8: bf16, and frozen layers in fp8.",
        short="precision",
    )  # fmt: skip
    cache_features: Annotated[int, Field(ge=0, le=10**6)] = declare(
        0, "Random draws of each view whose features are computed once (tuning linear); 0: new views in every step.",
        short="cache_features",
    )  # fmt: skip
    ema: Annotated[float, Field(ge=0, lt=1)] = declare(
        0.0,
        "Decay of an exponential moving average of the trained parameters, which is evaluated and exported; 0: none.",
    )
    patch_dropout: Annotated[float, Field(ge=0, lt=1)] = declare(
        0.0,
        "Share of the patches that views with a gradient lose at random (vision transformers): labeled and strong views, weak "
        "ones where the method learns from them. Faster steps.",
    )
    patch_dropout_until: Annotated[float, Field(gt=0, le=1)] = declare(
        1.0, "Share of the steps after which no patches are left out any more."
    )
    known_labels: bool = declare(
        False,
        "Labeled images that are drawn without their label keep it: their pseudo-label is the label, with full confidence.",
    )
    prior: Annotated[float, Field(ge=0, le=1)] = declare(
        0.0, "Share of the run during which labels propagated over frozen features weigh on the pseudo-labels, less and "
        "less; 0: never.",
    )  # fmt: skip


class Recipe(Options):
    seed: Annotated[int, Field(ge=0)] = declare(
        0, "Seed of the split, the initial weights and the views.", short="seed"
    )
    plugins: tuple[str, ...] = declare((), "Files and modules that register methods, tunings, … of your own.")
    data: DataRecipe = DataRecipe()
    source: Choice = declare(Choice("auto"), "Kind of source; recognised from the data, never set.")
    split: Choice = declare(Choice("auto"), "Split (finessl list splits), or a saved split file.", short="split")
    model: ModelRecipe = ModelRecipe()
    tuning: Choice = declare(Choice("vpt-deep"), "Tuning strategy (finessl list tunings).", short="tuning")
    head: Choice = declare(Choice("cosine"), "Classifier head (finessl list heads).", short="head")
    method: Choice = declare(Choice("finessl"), "Learning method (finessl list methods).", short="method")
    train: TrainRecipe = TrainRecipe()

    # ---- in and out -------------------------------------------------------------------------------------------------

    @classmethod
    def read(
        cls,
        file: str | Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        *,
        check: bool = True,
        source: bool = False,
    ) -> Recipe:
        """The defaults, then the TOML file, then `overrides` by dotted name. A FinesslError lists every mistake.

        check: also the names and their options.   source: also that the data is there.
        """
        tree, mistakes = cls().tree(), []
        for origin, layer in read_layers(file) if file is not None else ():
            mistakes += merge_all(tree, layer, origin)
        mistakes += override_all(tree, overrides or {})
        return cls._build(tree, mistakes, check, source)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], *, check: bool = True, source: bool = False) -> Recipe:
        """The inverse of `tree`.   tree: nested dicts, as in the TOML file.   check, source: as in `read`."""
        return cls._build(tree, [], check, source)

    def with_fields(self, overrides: Mapping[str, Any], origin: str = "--set", *, check: bool = True) -> Recipe:
        """The recipe with `overrides` by dotted name. A new name drops the old one's options, which others may then set.

        origin: what error messages call an override.   check: as in `read`.
        """
        tree = self.tree()
        return self._build(tree, override_all(tree, overrides, origin), check, False)

    @classmethod
    def restore(cls, file: Path) -> Recipe:
        """The recipe that a run directory keeps in `file`: its fields are checked, its names are not."""
        tree = read_toml(file)
        version = tree.pop("format", 1)
        if not isinstance(version, int) or version > FORMAT:
            raise FinesslError(f"{file} was written by a newer finessl; update finessl to read it.")
        if version == 1:
            upgrade(tree)
        try:
            return cls._build({**cls().tree(), **tree}, [], False, False)
        except FinesslError as error:
            raise FinesslError(f"{file}: {error}") from error

    @classmethod
    def _build(cls, tree: Mapping[str, Any], mistakes: list[str], check: bool, source: bool) -> Recipe:
        values: dict[str, Any] = {}
        for name, value in tree.items():
            if name not in cls.model_fields:
                mistakes.append(no_section(name, cls.model_fields))
                continue
            kind = cls.model_fields[name].annotation
            try:
                if kind is Choice:
                    values[name] = read_choice(name, value)
                elif isinstance(kind, type) and issubclass(kind, Options):
                    made, wrong = read_section(kind, name, value)
                    mistakes += wrong
                    values |= {name: made} if made is not None else {}
                else:
                    made, wrong = parse(cls, {name: value}, "a recipe has no section", str)
                    mistakes += wrong
                    values |= {name: getattr(made, name)} if made is not None else {}
            except FinesslError as error:
                mistakes.append(str(error))
        recipe = cls(**values)
        if check:
            from finessl.recipe.validate import check_choices

            recipe, wrong = check_choices(recipe, source)
            mistakes += [*wrong, *recipe.conflicts()]
        if mistakes:
            raise FinesslError("\n".join(dict.fromkeys(mistakes)))
        return recipe

    def checked(self, *, source: bool = False) -> Recipe:
        """The recipe with every name and option checked, options in their declared types.   source: as in `read`."""
        return Recipe.from_tree(self.tree(), source=source)

    def tree(self) -> dict[str, Any]:
        """Nested plain dicts, as in the TOML file; an option that is None is the word "none"."""
        tree: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Choice):
                tree[name] = {"name": value.name, **none_as_text(value.options)}
            elif isinstance(value, Options):
                tree[name] = {key: getattr(value, key) for key in type(value).model_fields}
            elif name != "plugins" or value:
                tree[name] = plain(value)
        for view in VIEWS:
            choice = tree["data"][view]
            tree["data"][view] = (
                {"name": choice.name, **none_as_text(choice.options)} if choice.options else choice.name
            )
        return tree

    def toml(self) -> str:
        """All fields but those that are None, which is their default."""
        tree = self.tree()
        return tomli_w.dumps({"format": FORMAT, **{name: without_none(value) for name, value in tree.items()}})

    def flat(self) -> dict[str, Any]:
        """Dotted name → value."""
        flat: dict[str, Any] = {}
        for section, value in self.tree().items():
            if not isinstance(value, dict):
                flat[section] = value
                continue
            for key, item in value.items():
                if section == "data" and key in VIEWS and isinstance(item, dict):
                    flat[f"data.{key}"] = item["name"]
                    flat |= {f"data.{key}.{option}": v for option, v in item.items() if option != "name"}
                else:
                    flat[f"{section}.{key}"] = item
        return flat

    def canonical(self) -> dict[str, Any]:
        """Dotted name → value, without what is None; equal for recipes that say the same in two ways."""
        flat = {name: value for name, value in self.flat().items() if value is not None}
        flat["data.labeled_in_unlabeled"] = self.labeled_in_unlabeled()
        flat = {name: value for name, value in flat.items() if not name.startswith("method.")}
        flat |= {f"method.{name}": value for name, value in canonical_method(self.method).items()}
        if self.split.name == "auto" and "split.labels_per_class" in flat:
            flat["split.name"] = "per-class"
        if self.plugins:
            flat["plugins"] = sorted(map(plugins.content, self.plugins))
        return flat

    def identity(self) -> dict[str, Any]:
        """Dotted name → value of what decides the result: `canonical` without the places where data and weights are
        kept, whose content is verified by digests instead."""
        return {name: value for name, value in self.canonical().items() if not is_place(name, value)}

    def differences(self, other: Recipe, *, places: bool = True) -> dict[str, tuple[Any, Any]]:
        """Dotted name → (value here, value there), where they differ. `places`: also where data and weights are kept."""
        mine, theirs = self.canonical(), other.canonical()
        names = list(mine | theirs) if places else list(self.identity() | other.identity())
        return {n: (mine.get(n), theirs.get(n)) for n in names if mine.get(n) != theirs.get(n)}

    # ---- sense ------------------------------------------------------------------------------------------------------

    def labeled_in_unlabeled(self) -> bool:
        """As the recipe says, or as the method has it."""
        if self.data.labeled_in_unlabeled is not None:
            return self.data.labeled_in_unlabeled
        from finessl.methods import METHODS

        return METHODS[self.method.name].labeled_in_unlabeled if self.method.name in METHODS else True

    def conflicts(self) -> list[str]:
        """Fields that do not go together."""
        train, found = self.train, []
        if train.cache_features and self.tuning.name != "linear":
            found.append(
                f"train.cache_features = {train.cache_features} needs a frozen backbone, and tuning "
                f"{self.tuning.name!r} trains inside it: use --tuning linear, or --cache-features 0."
            )
        if train.patch_dropout and train.cache_features:
            found.append(
                "train.patch_dropout needs views that are encoded in every step: leave it out, or --cache-features 0."
            )
        if train.known_labels and not self.labeled_in_unlabeled():
            found.append(
                "train.known_labels is about labeled images among the unlabeled ones, and data.labeled_in_unlabeled = false "
                "leaves none there: leave one of them out."
            )
        if self.step_bytes() > STEP_LIMIT:
            found.append(
                f"train.batch_size = {train.batch_size:,}, train.mu = {train.mu:,}, data.strong_views = "
                f"{self.data.strong_views} and data.image_size = {self.data.image_size or 'the default'} ask for "
                f"{self.step_bytes():,} bytes of images in one step, more than any machine holds. Make them smaller."
            )
        return found

    def step_bytes(self, image_size: int | None = None) -> int:
        """Bytes of one step's images in float32.   image_size: side in pixels; None: the recipe's, or 224."""
        side = image_size or self.data.image_size or 224
        images = self.train.batch_size * (1 + self.train.mu * (1 + self.data.strong_views))
        return images * side * side * 3 * 4


def is_place(name: str, value: Any) -> bool:
    """Does this field say where something is kept, and not what it is? The name of a known data set is no place."""
    if name == "data.source":
        from finessl.data.sources import named_sources

        return str(value) not in named_sources() and not str(value).startswith("hf:")
    return name in PLACES


def canonical_method(method: Choice) -> dict[str, Any]:
    """Name and options in one spelling, if the method is known and takes the options."""
    from finessl.methods import METHODS

    options = method.options
    if method.name in METHODS:
        target = METHODS[method.name]
        typed, mistakes = find_mistakes("method", method.name, target, options)
        options = options if mistakes else plain(target.canonical(typed))
    return {"name": method.name, **none_as_text(options)}


def upgrade(tree: dict[str, Any]) -> None:
    """A saved recipe of format 1, with what it meant when it was written."""
    method, split = tree.get("method"), tree.get("split")
    if isinstance(method, dict) and method.get("name") == "flexmatch":
        method.setdefault("warmup", True)
    if isinstance(split, dict) and split.get("name") == "auto" and "labels_per_class" in split:
        split["name"] = "per-class"


def none_as_text(value: Any) -> Any:
    """None as the word that TOML can hold."""
    if isinstance(value, Mapping):
        return {key: none_as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [none_as_text(item) for item in value]
    return "none" if value is None else value


def without_none(value: Any) -> Any:
    """A section without its fields that are None."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value
