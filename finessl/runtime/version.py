"""Versions, for files that record them."""

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Versions of finessl and of what its results depend on."""
    import platform

    import timm
    import torch

    return {
        "finessl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
    }
