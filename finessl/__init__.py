"""finessl: image classifiers from very few labels.

import finessl
classifier = finessl.train("photos/", out="run", backbone="dinov2-vit-s14")
classifier.predict(["new.jpg"])
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"
__all__ = ["Classifier", "FineSSLClassifier", "FinesslError", "__version__", "load", "train"]

from finessl.errors import FinesslError

TYPE_CHECKING = False  # as typing's, which takes longer to import than all that the command needs to catch Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from finessl.api import train
    from finessl.classifier import Classifier, load
    from finessl.estimator import FineSSLClassifier


def __getattr__(name: str) -> Any:
    """Import torch, timm and scikit-learn when they are needed, not with finessl."""
    modules = {"Classifier": "classifier", "load": "classifier", "train": "api", "FineSSLClassifier": "estimator"}
    if name in modules:
        return getattr(import_module(f"finessl.{modules[name]}"), name)
    raise AttributeError(f"module 'finessl' has no attribute {name!r}")
