"""finessl: image classifiers from very few labels.

import finessl
classifier = finessl.train("photos/", out="run", backbone="dinov2-vit-s14")
classifier.predict(["new.jpg"])
"""

from __future__ import annotations

from finessl.errors import FinesslError
from finessl.runtime.version import __version__

TYPE_CHECKING = False  # typing and others are imported after `finessl.__main__` has taken over Ctrl-C
__all__ = ["Classifier", "FineSSLClassifier", "FinesslError", "__version__", "load", "train"]

if TYPE_CHECKING:
    from finessl.api import train
    from finessl.estimator import FineSSLClassifier
    from finessl.inference.classifier import Classifier, load


def __getattr__(name: str) -> object:
    """Import torch, timm and scikit-learn when they are needed, not with finessl."""
    modules = {
        "Classifier": "inference.classifier",
        "load": "inference.classifier",
        "train": "api",
        "FineSSLClassifier": "estimator",
    }
    if name in modules:
        from importlib import import_module

        return getattr(import_module(f"finessl.{modules[name]}"), name)
    raise AttributeError(f"module 'finessl' has no attribute {name!r}")
