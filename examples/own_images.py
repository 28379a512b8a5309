"""Train on a folder of your own images, predict new ones and write a report.

    python examples/own_images.py                 # 340 steps, as `finessl demo`
    python examples/own_images.py --steps 20      # a quick look

The folder is made here from the sample images of the package: photos/labeled/CLASS/ (4 images per class),
photos/unlabeled/, photos/test/CLASS/ and new/ (images to predict). With images of your own, leave `make_folder` out.

Prints what is in the folder, the accuracy on the test images, the predicted classes of the new images with their
confidence, and where the report is. The same command again loads the finished run instead of training.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

import finessl
from finessl.analysis.report import write_report
from finessl.data.sources import open_dataset

LABELED = 4  # images per class


def make_folder(root: Path, per_class: int) -> None:
    """Write `per_class` training images of each class of the sample, and some to test and predict."""
    sample = open_dataset("sample")
    assert sample.test is not None and sample.test_labels is not None
    for number, name in enumerate(sample.classes):
        train = np.flatnonzero(sample.train_labels == number)[:per_class]
        test = np.flatnonzero(sample.test_labels == number)[: max(2, per_class // 10)]
        for images, positions, folder in (
            (sample.train, train[:LABELED], root / "photos" / "labeled" / name),
            (sample.train, train[LABELED:], root / "photos" / "unlabeled"),
            (sample.test, test[1:], root / "photos" / "test" / name),
            (sample.test, test[:1], root / "new"),
        ):
            folder.mkdir(parents=True, exist_ok=True)
            for i in positions:
                Image.fromarray(images.read(i)).save(folder / f"{name}-{i}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a folder of images, predict new ones, write a report.")
    parser.add_argument("--out", type=Path, default=Path("runs/own-images"), help="folder for images and run")
    parser.add_argument("--steps", type=int, default=340, help="training steps (default: 340)")
    parser.add_argument("--images", type=int, default=200, help="training images per class (default: 200)")
    options = parser.parse_args()

    make_folder(options.out, options.images)
    photos, run = options.out / "photos", options.out / "run"
    for part in ("labeled", "unlabeled", "test"):
        print(f"{photos / part}: {len(list((photos / part).rglob('*.png')))} images")

    classifier = finessl.train(
        photos,
        out=run,
        backbone="embedded",  # comes with the package; for photos, with a GPU: "clip-vit-b16" or "dinov2-vit-s14"
        tuning="lora",
        head_init="class-mean",
        batch_size=8,
        steps=options.steps,
        quiet=True,
    )

    test = sorted((photos / "test").rglob("*.png"))
    predicted = classifier.predict(test)
    correct = sum(name == path.parent.name for name, path in zip(predicted, test, strict=True))
    print(f"accuracy on {len(test)} test images: {correct / len(test):.1%}")

    new = sorted((options.out / "new").iterdir())
    for path, probabilities in zip(new, classifier.predict_proba(new), strict=True):
        print(f"{path.name}: {classifier.classes[probabilities.argmax()]} ({probabilities.max():.0%})")

    write_report([run], options.out / "report.html")  # on the command line: finessl report RUN
    print(f"report: {options.out / 'report.html'}")


if __name__ == "__main__":
    main()
