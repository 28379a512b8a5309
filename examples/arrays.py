"""`FineSSLClassifier` in a scikit-learn pipeline, on arrays.

    python examples/arrays.py                  # 340 steps for each of two methods
    python examples/arrays.py --steps 20       # a quick look

The images are the sample of the package, stored as 16-bit values as a scientific camera gives them. The pipeline
brings them into 0…1 and trains on 4 labels per class; the label "" marks an unlabeled image.

Prints the test accuracy of training on the labeled images alone and of FineSSL, which uses the unlabeled images, too,
and scikit-learn's table of precision and recall per class.
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.metrics import classification_report
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from finessl import FineSSLClassifier
from finessl.data.dataset import Dataset
from finessl.data.sources import open_dataset

LABELED = 4  # images per class


def arrays(data: Dataset, part: str, per_class: int) -> tuple[np.ndarray, np.ndarray]:
    """16-bit images [n, 32, 32, 3] and the names of their classes."""
    images, labels = (data.train, data.train_labels) if part == "train" else (data.test, data.test_labels)
    chosen = np.concatenate([np.flatnonzero(labels == number)[:per_class] for number in range(len(data.classes))])
    pixels = np.stack([images.read(i) for i in chosen]).astype(np.uint16) * 257
    return pixels, np.array(data.classes)[labels[chosen]]


def to_unit(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float32) / 65535


def main() -> None:
    parser = argparse.ArgumentParser(description="FineSSLClassifier in a scikit-learn pipeline.")
    parser.add_argument("--steps", type=int, default=340, help="training steps (default: 340)")
    parser.add_argument("--images", type=int, default=200, help="images per class (default: 200)")
    options = parser.parse_args()

    sample = open_dataset("sample")
    X, y = arrays(sample, "train", options.images)
    X_test, y_test = arrays(sample, "test", options.images)
    y[np.arange(len(y)) % options.images >= LABELED] = ""  # arrays() returns the classes one after another
    print(f"{(y != '').sum()} labeled and {(y == '').sum()} unlabeled images, {len(y_test)} test images")

    pipeline = make_pipeline(
        FunctionTransformer(to_unit),
        FineSSLClassifier(
            backbone="embedded", tuning="lora", head_init="class-mean", batch_size=8, steps=options.steps
        ),
    )
    for method in ("supervised", "finessl"):
        pipeline.set_params(finesslclassifier__method=method).fit(X, y)
        print(f"{method}: {pipeline.score(X_test, y_test):.1%} of the test images are right")
    print(classification_report(y_test, pipeline.predict(X_test), zero_division=0))


if __name__ == "__main__":
    main()
