"""The parts of `finessl bench studio`; the studio in a process of its own is what test_process.py talks to."""

from __future__ import annotations

import pytest

from finessl.bench.labeling import bench_labeling
from finessl.bench.scale import write_originals
from finessl.bench.studio import spread, thumbnail_rate, time_refit
from finessl.cli import app
from finessl.errors import FinesslError


def test_refit_is_fast_where_labels_are_propagated_and_where_not(monkeypatch):
    assert time_refit(300, repeats=1)["solver"] == "propagation"
    for module in ("features", "solve"):
        monkeypatch.setattr(f"finessl.studio.{module}.LINKED", 200)
    monkeypatch.setattr("finessl.bench.studio.LINKED", 200)
    found = time_refit(300, repeats=1)
    assert found["solver"] == "ridge" and found["seconds"] > 0


def test_thumbnails_and_spread(tmp_path):
    write_originals(tmp_path / "originals", 10)
    rates = thumbnail_rate(tmp_path / "originals", tmp_path / "state")
    assert rates["per_second"] > 0 and rates["decoded_per_second_and_core"] > 0
    assert spread([0.001, 0.002, 0.003])["p50_ms"] == pytest.approx(2)


def test_sizes_are_checked():
    with pytest.raises(FinesslError, match="--refit"):
        app(["bench", "studio", "--refit", "10,x"], standalone_mode=False)


def test_a_script_labels_through_the_studio(shapes):
    found = bench_labeling(str(shapes), target=1.0, most=6, pause=0.0, orders=["random"])
    assert [row.order for row in found] == ["random"]
    for row in found:
        assert [labels for labels, _ in row.curve] == list(range(3, row.labels + 1, 3))
        assert row.audited["kind"] == "audited" and row.audited["n"] == min(100, 72 - row.labels)
        assert row.audited["value"] == pytest.approx(row.accuracy, abs=0.05), "all images are audited"
