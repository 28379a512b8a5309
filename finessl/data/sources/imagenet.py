"""ImageNet (ILSVRC 2012): train/<wnid>/… and val/<wnid>/…. Its makers do not allow a download without an account."""

from __future__ import annotations

from pathlib import Path

from finessl.data.dataset import IMAGENET, Dataset
from finessl.data.sources.folder import open_folder
from finessl.errors import FinesslError
from finessl.runtime.callbacks import Count, no_count


def open_imagenet(root: Path | None, *, progress: Count = no_count) -> Dataset:
    """root: holds train/ and val/, or is the unpacked Kaggle archive (ILSVRC/Data/CLS-LOC/)."""
    if root is None:
        raise FinesslError("imagenet needs root: the folder that holds train/<wnid>/ and val/<wnid>/.")
    for folder in (root, root / "ILSVRC" / "Data" / "CLS-LOC", root / "imagenet"):
        if (folder / "train").is_dir():
            dataset = open_folder(folder, progress=progress)
            dataset.name, dataset.statistics = "imagenet", IMAGENET
            if dataset.test is None and (folder / "val").is_dir():
                raise FinesslError(
                    f"{folder / 'val'} should hold its images in val/<wnid>/; sort them into folders first, for example "
                    "with the script valprep.sh that is distributed for this."
                )
            return dataset
    raise FinesslError(
        f"{root} holds no imagenet: get ILSVRC 2012 from https://image-net.org (an account is needed) and unpack it as "
        "train/<wnid>/*.JPEG and val/<wnid>/*.JPEG there."
    )
