"""What a run is: every choice that decides its result, typed, checked, read from and written to TOML.

    [method]                                    Recipe.read("my.toml", {"method.alpha": 4.0, "train.steps": 2000})
    name = "finessl"
    alpha = 8.0            # what is not a field of the section is an option of the named method, strategy, split…

    [data.strong]          # a view with options; also strong = "randaugment(ops=3)" or --set data.strong.ops=3
    name = "randaugment"
    ops = 3

TOML has no null: the word "none" leaves an optional value out (`aux_threshold = "none"`).

A recipe that is going to be trained is checked completely (`check=True`): every name, and every option of what is named.
All mistakes are reported at once. The recipe of a finished run is read for its fields alone (`check=False`): a report
needs no plug-in, and runs none. How a run is carried out (device, checkpoints, progress) is not part of a recipe: see
`training.loop.Settings`.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field
from pydantic_core import PydanticCustomError

from finessl import plugins
from finessl.errors import FinesslError
from finessl.options import NONE, Count, Options, check_plain, parse, plain, shorten
from finessl.registry import nearest

FORMAT = 2  # of a saved recipe. 1, without this number: FlexMatch's `warmup` was true, labels_per_class always held
MAX_TOML = 16 << 20  # bytes
STEP_LIMIT = 2**40  # bytes of images in one step that no machine holds
VIEWS = ("weak", "strong")
# Fields that say where something is kept (and data.source, where it is a path). They are no part of a run's identity.
PLACES = ("data.root", "data.test", "source.labels", "model.weights", "head.text_features", "head.text_weights")

Steps = Annotated[int, Field(ge=1, le=10**9)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Choice:
    """A named thing (method, strategy, split, head, view) and its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


class DataRecipe(Options):
    source: str = ""  # folder, table, or the name of a data set
    root: str | None = None  # folder that holds a named data set
    test: str | None = None  # another folder or table with labeled images to test on
    image_size: Annotated[int, Field(ge=8, le=8192)] | None = None  # pixels; the backbone's own size by default
    statistics: Literal["model", "dataset"] = "model"  # whose mean and std normalise the images
    weak: Choice = Choice("crop-flip")
    strong: Choice = Choice("randaugment")
    strong_views: Annotated[int, Field(ge=1, le=100)] = 2
    labeled_in_unlabeled: bool | None = None  # are labeled images also unlabeled ones? None: as the method has it
    strict: bool = False  # refuse broken images instead of skipping them


class ModelRecipe(Options):
    backbone: str = "clip-vit-b16"
    weights: str | None = None  # file with the backbone's weights; timm's hub otherwise
    pretrained: bool = True


class TrainRecipe(Options):
    steps: Steps = 15_000
    epoch_steps: Steps = 500  # what the paper calls an epoch: evaluation and the class pace follow it
    batch_size: Count = 32  # labeled images per step, over all processes
    mu: Count = 1  # unlabeled images per labeled one
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: Positive = 0.03
    backbone_lr: Positive | None = None  # inside the backbone; `lr` by default, at most 1e-4 for tuning full and lp-ft
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: NotNegative = 5e-4
    # cosine-epoch: a step per epoch, as released; cosine-fixmatch: cos(7π/16 · t), which ends at 0.2 of the rate
    schedule: Literal["cosine", "cosine-epoch", "cosine-fixmatch", "constant"] = "cosine"
    warmup: Annotated[int, Field(ge=0, le=10**9)] = 0  # steps of linear warm-up
    clip_norm: Positive | None = None  # largest gradient norm
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"  # auto: bf16 where the chip supports it
    # draws of each view whose features are computed once (tuning linear); 0: new views in every step
    cache_features: Annotated[int, Field(ge=0, le=10**6)] = 0


class Recipe(Options):
    seed: Annotated[int, Field(ge=0)] = 0
    plugins: tuple[str, ...] = ()  # files and modules that register methods, strategies…: see plugins.py
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
        if file is not None:
            read = read_toml(find_recipe(file))
            read.pop("format", None)
            mistakes += merge_all(tree, read, str(file))
        mistakes += override_all(tree, overrides or {})
        return cls._build(tree, mistakes, check, source)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], *, check: bool = True, source: bool = False) -> Recipe:
        return cls._build(tree, [], check, source)

    @classmethod
    def restore(cls, file: Path) -> Recipe:
        """The recipe that a run directory keeps: its fields are checked, its names are not."""
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
                mistakes.append(no_section(name))
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
            from finessl.choices import check_choices

            recipe, wrong = check_choices(recipe, source)
            mistakes += [*wrong, *recipe.misfits()]
        if mistakes:
            raise FinesslError("\n".join(dict.fromkeys(mistakes)))
        return recipe

    def checked(self, *, source: bool = False) -> Recipe:
        """The recipe with every name and option checked, options in their declared types."""
        return Recipe.from_tree(self.tree(), source=source)

    def tree(self) -> dict[str, Any]:
        """Nested plain dicts, as in the TOML file; an option that is None is the word "none"."""
        tree: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Choice):
                tree[name] = {"name": value.name, **spelled(value.options)}
            elif isinstance(value, Options):
                tree[name] = {key: getattr(value, key) for key in type(value).model_fields}
            elif name != "plugins" or value:
                tree[name] = plain(value)
        for view in VIEWS:
            choice = tree["data"][view]
            tree["data"][view] = {"name": choice.name, **spelled(choice.options)} if choice.options else choice.name
        return tree

    def toml(self) -> str:
        """All fields but those that are None, which is their default."""
        tree = self.tree()
        return tomli_w.dumps({"format": FORMAT, **{name: present(value) for name, value in tree.items()}})

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

    def misfits(self) -> list[str]:
        """Fields that do not go together."""
        train, found = self.train, []
        if train.cache_features and self.tuning.name != "linear":
            found.append(
                f"train.cache_features = {train.cache_features} needs a frozen backbone, and tuning "
                f"{self.tuning.name!r} trains inside it: use --tuning linear, or --cache-features 0."
            )
        if self.step_bytes() > STEP_LIMIT:
            found.append(
                f"train.batch_size = {train.batch_size:,}, train.mu = {train.mu:,}, data.strong_views = "
                f"{self.data.strong_views} and data.image_size = {self.data.image_size or 'the default'} ask for "
                f"{self.step_bytes():,} bytes of images in one step, more than any machine holds. Make them smaller."
            )
        return found

    def step_bytes(self, image_size: int | None = None) -> int:
        """Bytes of one step's images in float32."""
        side = image_size or self.data.image_size or 224
        images = self.train.batch_size * (1 + self.train.mu * (1 + self.data.strong_views))
        return images * side * side * 3 * 4


def is_place(name: str, value: Any) -> bool:
    """Does this field say where something is kept, and not what it is? The name of a known data set is no place."""
    if name == "data.source":
        from finessl.data.sources import named_sources

        return str(value) not in named_sources() and not str(value).startswith("hf:")
    return name in PLACES


# ---- reading a tree -------------------------------------------------------------------------------------------------


def read_section(kind: type[Options], section: str, values: Any) -> tuple[Options | None, list[str]]:
    if not isinstance(values, Mapping):
        return None, [f"{section} = {shorten(values)} should be a section, [{section}], with fields of its own."]
    values = dict(values)
    mistakes = []
    for view in VIEWS if section == "data" else ():
        if view in values:
            try:
                values[view] = read_choice(f"data.{view}", read_view(values[view], f"data.{view}"))
            except FinesslError as error:
                mistakes.append(str(error))
                del values[view]
    made, wrong = parse(kind, values, f"[{section}] has no field", lambda name: f"{section}.{name}")
    return made, [*wrong, *mistakes]


def read_choice(section: str, table: Any) -> Choice:
    """A name and options that TOML can hold; whether they exist is for `choices.check_choices` to say."""
    if not isinstance(table, Mapping):
        raise FinesslError(f"{section} = {shorten(table)} should be a section, [{section}], with a name.")
    options = joined(table) if section == "tuning" else dict(table)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise FinesslError(f"{section}.name = {shorten(name)} should be a name.")
    for option, value in options.items():
        try:
            check_plain(value)
        except PydanticCustomError as error:
            raise FinesslError(f"{section}.{option} {error.message()}.") from error
        if dates := [v for v in leaves(value) if isinstance(v, (datetime.date, datetime.time))]:
            raise FinesslError(f"{section}.{option} = {dates[0]} is a date or time; no option takes one.")
    return Choice(name, {option: plain(value) for option, value in options.items()})


def leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def read_view(value: Any, where: str) -> dict[str, Any]:
    """'randaugment', 'randaugment(ops=3)' or a table → a table with a name."""
    if isinstance(value, Choice):
        return {"name": value.name, **value.options}
    if isinstance(value, Mapping):
        return dict(value)
    found = re.fullmatch(r"\s*([^()]*?)\s*(?:\((.*)\))?\s*", value, re.S) if isinstance(value, str) else None
    if found is None:
        raise FinesslError(f"{where} = {shorten(value)} should be a name, such as randaugment or randaugment(ops=3).")
    name, arguments = found.groups()
    try:
        return {"name": name, **tomllib.loads(f"options = {{{arguments or ''}}}")["options"]}
    except (ValueError, RecursionError) as error:
        raise FinesslError(
            f"{where} = {shorten(value)}: options are written name(option=value, option=value), texts in quotes."
        ) from error


def joined(tuning: Mapping[str, Any]) -> dict[str, Any]:
    """{'adapter': {'dim': 3}} → {'adapter.dim': 3}: an option of one of several joined strategies."""
    flat: dict[str, Any] = {}
    for name, value in tuning.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{option}": item for option, item in value.items()}
        else:
            flat[name] = value
    return flat


def upgrade(tree: dict[str, Any]) -> None:
    """A saved recipe of format 1, with its meaning of then written out."""
    method, split = tree.get("method"), tree.get("split")
    if isinstance(method, dict) and method.get("name") == "flexmatch":
        method.setdefault("warmup", True)
    if isinstance(split, dict) and split.get("name") == "auto" and "labels_per_class" in split:
        split["name"] = "per-class"


# ---- laying one tree over another -----------------------------------------------------------------------------------


def merge(tree: dict[str, Any], changes: Mapping[str, Any], origin: str) -> None:
    """Lay `changes` over `tree`, a section at a time. Naming another method (strategy, view…) drops the old one's
    options; of a split's, labels_per_class stays where the other split takes it too."""
    if mistakes := merge_all(tree, changes, origin):
        raise FinesslError("\n".join(mistakes))


def merge_all(tree: dict[str, Any], changes: Mapping[str, Any], origin: str) -> list[str]:
    """`merge`, as far as it goes, and a sentence for each mistake."""
    mistakes = []
    for section, value in changes.items():
        if section not in Recipe.model_fields:
            mistakes.append(f"{origin}: {no_section(section)} A field is written section.field=value.")
        elif section == "plugins":
            more = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else [value]
            tree[section] = [*tree.get(section, []), *more]
        elif not isinstance(tree.get(section), dict):
            tree[section] = value
        elif not isinstance(value, Mapping):
            mistakes.append(f"{origin}: {section} is a section; set one of its fields, {section}.… = {shorten(value)}.")
        elif section == "data":
            value = dict(value)
            for view in VIEWS:
                if view in value:
                    try:
                        value[view] = lay_over(
                            read_view(tree["data"][view], f"data.{view}"), read_view(value[view], f"data.{view}")
                        )
                    except FinesslError as error:
                        mistakes.append(str(error))
                        del value[view]
            tree[section] = {**tree[section], **value}
        else:
            kept = label_count(tree[section], value.get("name")) if section == "split" else {}
            tree[section] = lay_over(tree[section], joined(value) if section == "tuning" else value, kept)
    return mistakes


def lay_over(old: Mapping[str, Any], new: Mapping[str, Any], kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`old` with `new` over it; under another name only `kept` of the old one stays."""
    renamed = "name" in new and new["name"] != old.get("name")
    return {**((kept or {}) if renamed else old), **new}


def label_count(split: Mapping[str, Any], other: Any) -> dict[str, Any]:
    """`labels_per_class` of a split, if the split named `other` takes it."""
    from finessl.data.splits import SPLITS
    from finessl.options import options_of

    known = isinstance(other, str) and other in SPLITS
    takes = other == "auto" or (known and "labels_per_class" in options_of(SPLITS[other]))
    return {name: value for name, value in split.items() if takes and name == "labels_per_class"}


def override(tree: dict[str, Any], overrides: Mapping[str, Any], origin: str = "--set") -> None:
    """Lay values by dotted name over `tree`. Names come first: another method drops the old one's options, which other
    overrides may then set."""
    if mistakes := override_all(tree, overrides, origin):
        raise FinesslError("\n".join(mistakes))


def override_all(tree: dict[str, Any], overrides: Mapping[str, Any], origin: str = "--set") -> list[str]:
    mistakes = []
    for name, value in sorted(overrides.items(), key=lambda item: not names_something(item[0])):
        parts = name.split(".")
        if len(parts) == 1:
            changes = {name: value}
        elif len(parts) == 2:
            changes = {parts[0]: {parts[1]: value}}
        elif len(parts) == 3 and parts[0] == "tuning":
            changes = {"tuning": {".".join(parts[1:]): value}}
        elif len(parts) == 3 and parts[0] == "data" and parts[1] in VIEWS:
            changes = {"data": {parts[1]: {parts[2]: value}}}
        else:
            near = nearest(name, [f"{parts[0]}.{parts[-1]}"])
            mistakes.append(
                f"{origin} {name}: no field has this name{near or '.'} A name is section.field; "
                "data.weak.OPTION, data.strong.OPTION and tuning.STRATEGY.OPTION have three parts."
            )
            continue
        mistakes += merge_all(tree, changes, f"{origin} {name}")
    if overrides.get("split.labels_per_class") not in (None, *NONE) and tree["split"].get("name") == "auto":
        tree["split"]["name"] = "per-class"  # asked for: also where the data divides its images itself
    return mistakes


def names_something(name: str) -> bool:
    return name.endswith(".name") or name in {f"data.{view}" for view in VIEWS}


def no_section(name: str) -> str:
    known = Recipe.model_fields
    return f"a recipe has no section {name!r}{nearest(name, known) or '.'} Known: {', '.join(known)}."


# ---- text -----------------------------------------------------------------------------------------------------------


def parse_setting(text: str) -> tuple[str, Any]:
    """'method.alpha=4' → ('method.alpha', 4); a value that is not TOML is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise FinesslError(f"--set {text!r} should read section.field=value, for example --set method.alpha=4.")
    try:
        read = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):  # no TOML; an integer of thousands of digits; lists within lists
        return name.strip(), value
    return name.strip(), read["value"] if len(read) == 1 else value


def recipe_folder() -> Path:
    """Where the shipped recipes are: inside an installed package, next to it in a checkout."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "recipes"


def find_recipe(name: str | Path) -> Path:
    """A recipe file, or the name of one that is shipped (with or without .toml)."""
    for path in (Path(name), recipe_folder() / f"{name}.toml", recipe_folder() / name):
        try:
            if path.is_file():
                return path
        except (OSError, ValueError):  # too long, or a NUL character in it
            continue
    shipped = [path.stem for path in sorted(recipe_folder().glob("*.toml"))]
    raise FinesslError(
        f"no recipe file {shorten(str(name))}{nearest(str(name), shipped) or '.'} "
        f"Shipped recipes: {', '.join(shipped) or 'none'}."
    )


def read_toml(path: Path) -> dict[str, Any]:
    from finessl.files import read_bytes  # imports numpy

    content = read_bytes(path, MAX_TOML)
    try:
        return tomllib.loads(content.decode("utf-8-sig", "surrogateescape"))  # paths may have other encodings
    except RecursionError as error:
        raise FinesslError(f"{path} is not a recipe: its lists are nested too deeply.") from error
    except ValueError as error:
        raise FinesslError(f"{path} is not valid TOML: {error}.") from error


def spelled(value: Any) -> Any:
    """None as the word that TOML can hold."""
    if isinstance(value, Mapping):
        return {key: spelled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [spelled(item) for item in value]
    return "none" if value is None else value


def present(value: Any) -> Any:
    """A section without its fields that are None."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value
