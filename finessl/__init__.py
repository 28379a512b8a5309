"""finessl: image classifiers from very few labels.

import finessl
classifier = finessl.train("photos/", out="run", backbone="dinov2-vit-s14")
classifier.predict(["new.jpg"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Classifier", "FineSSLClassifier", "FinesslError", "__version__", "load", "train"]

from finessl.errors import FinesslError

if TYPE_CHECKING:
    from finessl.api import FineSSLClassifier, train
    from finessl.classifier import Classifier, load


def __getattr__(name: str) -> Any:
    """torch and timm are imported when they are needed, not when finessl is."""
    if name in ("Classifier", "load"):
        from finessl import classifier

        return getattr(classifier, name)
    if name in ("FineSSLClassifier", "train"):
        from finessl import api

        return getattr(api, name)
    raise AttributeError(f"module 'finessl' has no attribute {name!r}")
