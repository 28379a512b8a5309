"""Features in clouds, and a cache of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("FINESSL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def clouds() -> tuple[np.ndarray, np.ndarray]:
    """float32 [120, 12] features in four uneven clouds, and their classes."""
    rng = np.random.default_rng(3)
    truth = np.repeat(np.arange(4), (50, 30, 25, 15))
    centres = rng.normal(0, 1, (4, 12))
    return (centres[truth] + rng.normal(0, 0.45, (120, 12)) + 2.0).astype(np.float32), truth
