"""Grids on a Ray cluster: a real one of two workers on this machine, one of which is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from finessl.errors import FinesslError
from finessl.recipe import Recipe
from finessl.runs.directory import RunDirectory
from finessl.sweeps import compare
from finessl.sweeps.engines.cluster import run_ray

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'finessl[ray]'")
pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds the worker to kill in /proc")

SETTINGS = {
    "split.labels_per_class": 4, "model.backbone": "vit_tiny_patch16_224", "model.pretrained": False,
    "data.image_size": 32, "tuning.length": 2, "train.batch_size": 4, "train.epoch_steps": 20, "method.name": "fixmatch",
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own 15 would starve them while other tests run
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
    del os.environ["RAY_worker_niceness"]  # noqa: SIM112


def test_a_lost_workers_cell_goes_on_from_its_checkpoint(cluster: None, shapes: Path, tmp_path: Path) -> None:
    base = Recipe.read(None, {**SETTINGS, "data.source": str(shapes), "train.steps": 40})
    safe, lost = (
        compare.Cell({}, base, RunDirectory(tmp_path / f"{name}-{uuid.uuid4().hex[:8]}")) for name in ("safe", "lost")
    )
    for cell in (safe, lost):
        cell.run.open(cell.recipe)
    ended: dict[str, str | None] = {}
    said: list[str] = []
    killer = threading.Thread(target=kill_worker_of, args=(lost,))
    killer.start()
    run_ray(
        [safe, lost],
        lambda cell, error: ended.update({cell.name: error}),
        said.append,
        device="cpu",
        checkpoint_seconds=0,
    )
    killer.join()

    assert ended == {safe.name: None, lost.name: None}
    (line,) = said  # only the killed one went on from anywhere
    assert line.startswith(f"{lost.name}: went on from step ") and int(line.split()[-1]) >= 3
    # equal runs write equal files: the kill has left no trace
    assert lost.run.finished() and safe.run.finished()
    assert lost.run.metrics_file.read_text() == safe.run.metrics_file.read_text()


def kill_worker_of(cell: compare.Cell) -> None:
    """SIGKILL to the worker that trains the cell, once it has written a few checkpoints."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        kept = sorted(cell.run.checkpoints.glob("step-*"))
        if kept and int(kept[-1].name[5:]) >= 3:
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    title = (folder / "cmdline").read_bytes()
                except OSError:
                    continue
                if title.startswith(f"ray::{cell.name}".encode()):
                    os.kill(int(folder.name), signal.SIGKILL)
                    return
        time.sleep(0.02)


def test_a_failing_cell_is_tried_again_and_reported(cluster: None, shapes: Path, tmp_path: Path) -> None:
    base = Recipe.read(None, {**SETTINGS, "data.source": str(shapes / "nowhere"), "train.steps": 3})
    (cell,) = compare.make_cells(base, {"seed": [0]}, tmp_path)
    cell.run.open(cell.recipe)
    ended: dict[str, str | None] = {}
    said: list[str] = []
    run_ray([cell], lambda cell, error: ended.update({cell.name: error}), said.append, device="cpu", retries=1)
    assert "there is no such folder" in str(ended["seed=0"])
    assert len(said) == 1 and "will be tried again" in said[0]


def test_more_than_the_cluster_has_is_refused(cluster: None, tmp_path: Path) -> None:
    (cell,) = compare.make_cells(Recipe(), {"seed": [0]}, tmp_path)
    with pytest.raises(FinesslError, match="asks for 1 CPUs and 2 GPUs; the cluster has 2 and 0"):
        run_ray([cell], lambda cell, error: None, print, gpus=2)
