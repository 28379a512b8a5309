"""finessl select."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finessl.cli import app
from finessl.cli.options import Device, FeatureBackbone, Fields, Weights, recipe_options
from finessl.cli.quick import named_files
from finessl.errors import FinesslError

if TYPE_CHECKING:
    import numpy as np

    from finessl.data.images import Images

COLUMNS = ("rank", "path", "suggested", "label")


@app.command(no_args_is_help=True)
@recipe_options("labels", "root", "path_column", "label_column", "precision", "seed")
def select(
    *,
    data: Annotated[str, typer.Argument(help="A folder of images, or any data that train takes.", show_default=False)],
    out: Annotated[Path, typer.Option(help="CSV to write: rank, path, suggested, label (empty).", show_default=False)],
    count: Annotated[int, typer.Option("--count", "-k", help="Number of images to choose.", min=1)] = 50,
    fields: Fields,
    strategy: Annotated[str, typer.Option(help="Strategy: herding, typical or random.")] = "herding",
    backbone: FeatureBackbone = "auto",
    weights: Weights = None,
    device: Device = "auto",
) -> None:
    """Choose the images whose labels help most, best first.

    Fill in the label column, then: finessl train DATA --labels FILE (or finessl quick DATA --labels FILE).
    """
    from finessl.api import make_recipe
    from finessl.data.dataset import count_of
    from finessl.frozen.features import FrozenEncoder, encode_images
    from finessl.frozen.select import select_images
    from finessl.models.backbones import candidate_backbones, create_backbone
    from finessl.runtime.device import resolve_device
    from finessl.runtime.files import write_output
    from finessl.runtime.precision import resolve_precision
    from finessl.runtime.progress import Display

    check_target(out)
    target = resolve_device(device)
    recipe = make_recipe(None, fields, check=False)
    precision = resolve_precision(recipe.train.precision, target)
    (name, file), *_ = candidate_backbones(backbone, named_files(weights or []))
    with Display() as display:
        images, ids, classes, notes = open_images(data, recipe.data.root, recipe.source.options)
        encoder = FrozenEncoder(create_backbone(name, weights=file), target, precision)
        encoding = f"{name}: encoding images"
        features = encode_images(images, encoder, progress=lambda done, total: display.update(encoding, done, total))
        found = select_images(
            features.rows, count, usable=features.usable(), labels=ids, classes=len(classes), seed=recipe.seed,
            strategy=strategy, device=target, progress=display.update,  # type: ignore[arg-type]
        )  # fmt: skip
    rows = [
        (rank, images.key(int(i)), classes[found.suggested[i]] if found.suggested[i] >= 0 else "", "")
        for rank, i in enumerate(found.chosen, 1)
    ]
    if not rows:
        raise FinesslError(f"no image of {data} is left to choose from: each has a label, is a copy or cannot be read.")
    write_output(out, [COLUMNS, *rows])
    for note in notes:
        print(note)
    if features.failures:
        print(f"{count_of(len(features.failures), 'image')} cannot be read and are left out.")
    if found.duplicates:
        print(f"{count_of(found.duplicates, 'near-duplicate')} passed over.")
    if len(rows) < count:
        print(f"Only {count_of(len(rows), 'image is', 'images are')} left to choose from.")
    known = int((ids >= 0).sum())
    print(f"{out}: {count_of(len(rows), 'image')} to label, by {strategy} on {name}; {known:,} have a label.")
    if takes_labels(data, recipe.data.root):
        print(f"Fill in the label column, then: finessl quick {shlex.quote(data)} --labels {shlex.quote(str(out))}")
    else:
        print("Fill in the label column. This kind of data takes no --labels: a folder of the images does.")


def takes_labels(data: str, root: str | None) -> bool:
    from finessl.data.sources import SOURCES, recognise
    from finessl.registry.options import options_of

    return "labels" in options_of(SOURCES[recognise(data, root)[0]])


def open_images(
    data: str, root: str | None, options: Mapping[str, Any]
) -> tuple[Images, np.ndarray, list[str], list[str]]:
    """Images, labels (−1: none), classes and notes. A folder needs no labels at all.   options: of the source."""
    import numpy as np

    from finessl.data.folder_index import natural
    from finessl.data.sources import open_dataset, recognise
    from finessl.data.sources.folder import open_pile

    kind, path = recognise(data, root)
    if kind == "folder" and path is not None and set(options) <= {"labels"}:
        images, named, _ = open_pile(Path(path), options.get("labels"))
        classes = sorted(set(named.values()), key=natural)
        number = {name: k for k, name in enumerate(classes)} | {"": -1}
        ids = np.array([number[named.get(images.key(i), "")] for i in range(len(images))], np.int64)
        return images, ids, classes, []
    dataset = open_dataset(data, root=root, **options)  # refuses options that the source does not take
    if dataset.given is None:
        ids = np.full(len(dataset.train), -1)
        return dataset.train, ids, dataset.classes, [f"{dataset.name} has a label for every image: they are not used."]
    ids = np.where(dataset.given, dataset.train_labels, -1)
    return dataset.train, ids, dataset.classes, []


def check_target(out: Path) -> None:
    """Refuse to overwrite labels that somebody has filled in."""
    from finessl.data.sources.table import read_rows
    from finessl.runtime.files import writing

    with writing(out):
        if not out.exists():
            return
    try:
        filled = sum(bool(label) for label in read_rows(out).labels)
    except FinesslError as error:
        raise FinesslError(f"{out} exists and is no list of finessl select ({error}); name another --out.") from error
    if filled:
        raise FinesslError(f"{out} holds {filled:,} labels; name another --out.")
