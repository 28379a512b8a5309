"""The process that encodes the images: `python -m finessl.studio.encoder`, started by the studio (features.py).

Its own process, because torch and a backbone take memory and time that labeling should not wait for. It writes JSON
lines: the backbone, progress, and the files of each part that is complete.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from finessl.data.images import FileImages
from finessl.errors import FinesslError
from finessl.frozen.features import FrozenEncoder, encode_images
from finessl.models.backbones import candidate_backbones, create_backbone
from finessl.runtime.device import resolve_device
from finessl.runtime.machine import yield_to_others
from finessl.runtime.precision import resolve_precision
from finessl.studio.project import open_project

FIRST, GROWTH = 256, 4  # images of the first part; how many times larger each following part is
Say = Callable[..., None]


def encode_parts(images: FileImages, encoder: FrozenEncoder, folder: Path, say: Say) -> Iterator[dict[str, str]]:
    """Files with ids, features and broken images of each part. Images are in random order: a part represents all."""
    total, fresh = len(images), 0
    order = np.random.default_rng(0).permutation(total)
    for size in part_sizes(total):
        part = np.sort(order[:size])
        begun = fresh

        def progress(done: int, todo: int, begun: int = begun, size: int = size) -> None:
            nonlocal fresh
            fresh = begun + done
            say(done=size - todo + done, fresh=fresh)

        found = encode_images(images.take(part), encoder, progress=progress)
        good = found.usable()
        arrays = {"ids": part[good], "rows": found.rows if good.all() else found.rows[good], "broken": part[~good]}
        files = {name: str(folder / f"{name}-{size}.npy") for name in arrays}
        for name, array in arrays.items():
            np.save(files[name], array)
        yield files


def part_sizes(total: int) -> list[int]:
    sizes = [min(FIRST, total)]
    while sizes[-1] < total:
        following = sizes[-1] * GROWTH
        sizes.append(total if 2 * following > total else following)
    return sizes


def forward_rate(encoder: FrozenEncoder) -> float:
    """Images per second through the backbone alone."""
    size, count = encoder.backbone.image_size, 8
    pixels = np.zeros((count, size, size, 3), np.uint8)
    encoder.forward(pixels)  # the first call prepares
    begun = time.perf_counter()
    encoder.forward(pixels)
    return count / max(time.perf_counter() - begun, 1e-6)


def main() -> None:
    """Reads its orders as one JSON object from the standard input."""
    orders: dict[str, Any] = json.loads(sys.stdin.readline())
    yield_to_others()

    def say(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    try:
        images = open_project(orders["data"], Path(orders["folder"])).images
        if images.fingerprint() != orders["fingerprint"]:
            raise FinesslError("the images have changed since the studio was opened; open it again.")
        target = resolve_device(orders["device"])
        (name, file), *_ = candidate_backbones(orders["backbone"], orders["files"])
        say(backbone=name, weights=file)
        backbone = create_backbone(name, weights=file)
        encoder = FrozenEncoder(backbone, target, resolve_precision("auto", target))
        say(rate=forward_rate(encoder))
        folder = Path(orders["folder"]) / "features"
        folder.mkdir(exist_ok=True)
        for files in encode_parts(images, encoder, folder, say):
            say(part=files)
        say(finished=True)
    except BrokenPipeError:  # the studio has gone
        os._exit(1)
    except FinesslError as error:
        say(error=str(error))
    except Exception as error:  # the page shows every error
        say(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
