"""Cells as tasks of a Ray cluster.

ray start --head                                     # on one machine, and `ray start --address …` on the others
finessl compare DATA --methods all --engine ray --address auto
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from typing import Any

from finessl.errors import FinesslError
from finessl.runs.directory import RunDirectory
from finessl.runtime.callbacks import Log
from finessl.runtime.ray import connected
from finessl.sweeps.compare import Cell
from finessl.sweeps.engines import Ended


def run_ray(
    cells: Sequence[Cell],
    ended: Ended,
    log: Log,
    *,
    address: str | None = None,
    cpus: float = 1,
    gpus: float | None = None,
    device: str = "auto",
    retries: int = 1,
    checkpoint_seconds: float = 120.0,
) -> None:
    """Run each cell as a task. Run directories, data and weights must be on storage that all machines share. When a worker is
    lost, Ray restarts its cell on another one, where it resumes from its checkpoint.

    address: of a running cluster ("auto": of this machine); None: a new local one.   cpus, gpus: per cell; gpus None: 1 if the
    cluster has any.   retries: per failed cell.
    """
    with connected(address) as ray:
        have = ray.cluster_resources()
        share = (1.0 if have.get("GPU") and device != "cpu" else 0.0) if gpus is None else gpus
        if cpus > have.get("CPU", 0) or share > have.get("GPU", 0):
            raise FinesslError(
                f"a cell asks for {cpus:g} CPUs and {share:g} GPUs; the cluster has {have.get('CPU', 0):g} and "
                f"{have.get('GPU', 0):g}."
            )
        task = ray.remote(train_cell)

        def submit(cell: Cell) -> Any:
            options = dict(num_cpus=cpus, num_gpus=share, max_retries=retries, name=cell.name)
            arguments = (str(cell.run.path.resolve()), os.getcwd(), device, max(int(cpus), 1), checkpoint_seconds)
            return task.options(**options).remote(*arguments)

        pending = {submit(cell): (cell, 0) for cell in cells}
        while pending:
            (reference, *_), _ = ray.wait(list(pending), num_returns=1)
            cell, tries = pending.pop(reference)
            failure: str | None
            try:
                failure, first_step = ray.get(reference)
                if first_step:
                    log(f"{cell.name}: went on from step {first_step}")
            except ray.exceptions.RayError as lost:  # the worker died more often than `retries`
                failure, tries = f"its worker was lost: {str(lost).splitlines()[0]}", retries
            if failure and tries < retries:
                log(f"{cell.name}: failed, will be tried again: {failure}")
                pending[submit(cell)] = (cell, tries + 1)
            else:
                ended(cell, failure)


def train_cell(path: str, folder: str, device: str, threads: int, checkpoint_seconds: float) -> tuple[str | None, int]:
    """Train a run, in the worker. Returns its error or None, and the step from which it resumed."""
    import torch

    from finessl.training.loop import Settings, train

    os.chdir(folder)  # relative paths of data and weights are relative to the user's folder
    torch.set_num_threads(threads)
    run = RunDirectory(path)
    kept = sorted(run.checkpoints.glob("step-*"))
    first_step = int(kept[-1].name.removeprefix("step-")) if kept else 0
    try:
        train(run.recipe(), path, Settings(device=device, quiet=True, checkpoint_seconds=checkpoint_seconds))
        return None, first_step
    except FinesslError as error:
        return str(error), first_step
    except Exception as error:  # a failed cell must not affect the others
        (run.path / "error.log").write_text(traceback.format_exc(), encoding="utf-8")
        return f"{type(error).__name__}: {error}", first_step
