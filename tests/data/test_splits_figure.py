"""The picture of a split shows its counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from finessl.analysis.split_figure import draw_split
from finessl.data.dataset import Dataset
from finessl.data.images import ArrayImages
from finessl.data.splits import make_split
from finessl.errors import FinesslError


def test_bars_are_the_counts(tmp_path: Path) -> None:
    labels = np.repeat(np.arange(6), [60, 50, 40, 30, 20, 10])
    data = Dataset("toy", [f"class {i}" for i in range(6)], ArrayImages(np.zeros((210, 1, 1, 3), np.uint8)), labels)
    split = make_split(data, kind="open-set", labels_per_class=4)
    figure = draw_split(split, data, tmp_path / "split.png")
    unlabeled, labeled, other = figure.axes[0].containers
    assert [bar.get_height() for bar in unlabeled] == [60, 50, 40] and [bar.get_height() for bar in labeled] == [
        4,
        4,
        4,
    ]
    assert [bar.get_height() for bar in other] == [60]
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["class 0", "class 1", "class 2"]
    with Image.open(tmp_path / "split.png") as image:
        assert image.width > 600 and len(image.convert("RGB").getcolors(1 << 20) or []) > 10
    with pytest.raises(FinesslError, match="cannot draw .*split.xyz: Format 'xyz' is not supported"):
        draw_split(split, data, tmp_path / "split.xyz")
