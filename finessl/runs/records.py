"""Records: what is kept of a finished run without its weights.

RECORD/recipe.toml       as in the run directory, with the names of files and folders in place of their paths
RECORD/meta.json         as in the run directory
RECORD/answers.npz       answered class and label of the test images, in place of the logits in predictions.npz: some 20 KB of
                         10,000 images and 100 classes

`finessl paper` reads records as it reads run directories.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from finessl.errors import FinesslError
from finessl.recipe import Recipe
from finessl.recipe.schema import is_place
from finessl.runs.directory import RunDirectory
from finessl.runtime.files import read_arrays, write_arrays, write_atomically, write_json, writing


def write_record(run: RunDirectory, folder: Path, revision: str | None = None) -> None:
    """Write the record of a finished run into `folder`. One that is there is replaced if its accuracy is the same.

    revision: that of the code, for a run that does not know it.
    """
    meta, known = run.meta(), RunDirectory(folder).meta()
    if not meta.get("finished"):
        raise FinesslError(f"{run.path} has not finished.")
    if known and known.get("accuracy") != meta.get("accuracy"):
        raise FinesslError(
            f"{folder} is the record of a run with another accuracy ({known.get('accuracy')}, {run.path} has "
            f"{meta.get('accuracy')}). Remove it first if the new run is to take its place."
        )
    answered = read_answers(run)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "recipe.toml", without_folders(run.recipe()).toml())
        if answered is not None:
            answers, labels = (a.astype(np.min_scalar_type(int(a.max(initial=0)))) for a in answered)
            write_arrays(folder / "answers.npz", {"answers": answers, "labels": labels})
        write_json(folder / "meta.json", {**meta, "revision": meta.get("revision") or revision})


def without_folders(recipe: Recipe) -> Recipe:
    """The recipe with "weights.pt" where it has "/home/me/weights.pt"; of joined backbones also "a=x.pt,b=y.pt"."""
    places = {name: value for name, value in recipe.flat().items() if isinstance(value, str) and is_place(name, value)}
    names = {name: re.sub(r"(^|[=,])[^=,]*[/\\](?=[^/\\])", r"\1", value) for name, value in places.items()}
    return recipe.with_fields(names, check=False)


def read_answers(run: RunDirectory) -> tuple[np.ndarray, np.ndarray] | None:
    """Answered class and label of each test image; None if the run or record has not kept them."""
    if (file := run.path / "predictions.npz").exists():
        arrays = read_arrays(file, "logits", "labels")
        return arrays["logits"].argmax(1), arrays["labels"]
    if (file := run.path / "answers.npz").exists():
        arrays = read_arrays(file, "answers", "labels")
        return arrays["answers"], arrays["labels"]
    return None
