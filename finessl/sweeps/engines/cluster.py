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
from finessl.runtime.ray import connected
from finessl.sweeps.engines import Ended, Job, Say


def run_ray(
    cells: Sequence[Job],
    ended: Ended,
    say: Say,
    *,
    address: str | None = None,
    cpus: float = 1,
    gpus: float | None = None,
    device: str = "auto",
    retries: int = 1,
    checkpoint_seconds: float = 120.0,
) -> None:
    """Each cell is a task with its share of CPUs and GPUs. The run directories, data and weights must lie where all
    machines see them. When a worker is lost Ray starts its cell again elsewhere, and it goes on from its checkpoint.

    address: of a running cluster ("auto": this machine's); None starts one here.   gpus: a cell, 1 by default where the
    cluster has any.
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

        def submit(cell: Job) -> Any:
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
                    say(f"{cell.name}: went on from step {first_step}")
            except ray.exceptions.RayError as lost:  # the worker died more often than `retries`
                failure, tries = f"its worker was lost: {str(lost).splitlines()[0]}", retries
            if failure and tries < retries:
                say(f"{cell.name}: failed, will be tried again: {failure}")
                pending[submit(cell)] = (cell, tries + 1)
            else:
                ended(cell, failure)


def train_cell(path: str, folder: str, device: str, threads: int, checkpoint_seconds: float) -> tuple[str | None, int]:
    """In the worker: train the run to its end. Its error, if any, and the step that it went on from."""
    import torch

    from finessl.training.loop import Settings, train

    os.chdir(folder)  # relative paths of data and weights mean the same as for the user
    torch.set_num_threads(threads)
    run = RunDirectory(path)
    kept = sorted(run.checkpoints.glob("step-*"))
    first_step = int(kept[-1].name.removeprefix("step-")) if kept else 0
    try:
        train(run.recipe(), path, Settings(device=device, quiet=True, checkpoint_seconds=checkpoint_seconds))
        return None, first_step
    except FinesslError as error:
        return str(error), first_step
    except Exception as error:  # one cell's failure is its own
        (run.path / "error.log").write_text(traceback.format_exc(), encoding="utf-8")
        return f"{type(error).__name__}: {error}", first_step
