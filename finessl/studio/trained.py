"""What a finished run says of every image: computed once per run, in a process of its own, kept in FOLDER/runs/.

`python -m finessl.studio.trained` is that process; it reads its orders as JSON from the standard input.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finessl.errors import FinesslError
from finessl.runtime.files import read_arrays, write_arrays
from finessl.runtime.machine import yield_to_others
from finessl.studio.events import Labels
from finessl.studio.project import Project, open_project


@dataclass(frozen=True)
class Trained:
    run: Path
    names: list[str]  # class of each column
    p: np.ndarray  # float16 [N, C]; zero where the image cannot be read

    def classes(self, labels: Labels) -> np.ndarray:
        """Class id of each column; −1: the studio has no class of that name now."""
        return np.array([labels.names.index(name) if name in labels.names else -1 for name in self.names])

    def answers(self, labels: Labels) -> tuple[np.ndarray, np.ndarray]:
        """Class id (−1: none) and confidence of every image."""
        confidence = self.p.max(1).astype(np.float32)
        return np.where(confidence > 0, self.classes(labels)[self.p.argmax(1)], -1), confidence


def predictions_file(project: Project, run: Path) -> Path:
    own = run.parent == project.folder / "runs"
    return project.folder / "runs" / f"{run.name if own else 'given'}.predictions.npz"


def read_trained(project: Project, run: Path) -> Trained | None:
    """None where they are not computed, or of other images."""
    file = predictions_file(project, run)
    if not file.is_file():
        return None
    arrays = read_arrays(file, "p", "classes", "images", "run")
    if str(arrays["images"]) != project.images.fingerprint() or str(arrays["run"]) != str(run):
        return None
    return Trained(run, arrays["classes"].tolist(), arrays["p"])


def start_predicting(project: Project, run: Path, device: str) -> subprocess.Popen[bytes]:
    orders = {
        "data": str(project.data), "folder": str(project.folder), "run": str(run), "device": device,
        "file": str(predictions_file(project, run)),
    }  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "finessl.studio.trained"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(json.dumps(orders).encode())
    process.stdin.close()
    return process


def main() -> None:
    from finessl.inference.classifier import load
    from finessl.inference.evaluate import predict_images

    orders = json.loads(sys.stdin.read())
    yield_to_others()
    try:
        images = open_project(orders["data"], Path(orders["folder"])).images
        classifier = load(orders["run"], device=orders["device"])
        p = np.zeros((len(images), len(classifier.classes)), np.float16)
        for positions, found, _ in predict_images(classifier, images):
            p[positions] = found
        Path(orders["file"]).parent.mkdir(parents=True, exist_ok=True)
        facts = {"images": np.array(images.fingerprint()), "run": np.array(orders["run"])}
        write_arrays(Path(orders["file"]), {"p": p, "classes": np.array(classifier.classes), **facts})
    except FinesslError as error:
        print(f"finessl: the answers of {orders['run']} are not known: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
