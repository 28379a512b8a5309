"""Engines that run the cells of a grid: on this machine, on a Ray cluster, or as commands for another scheduler.

A cell is a run directory, so every engine does the same: finished cells are skipped, interrupted ones resume from their
checkpoint, and a failed cell does not affect the others.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence

from finessl.errors import FinesslError, Mistakes
from finessl.registry import nearest
from finessl.runtime.callbacks import Log
from finessl.sweeps.compare import Cell

ENGINES = ("local", "ray", "print")


Ended = Callable[[Cell, str | None], None]  # (cell, error of its last attempt or None)


def run_cells(
    cells: Sequence[Cell],
    *,
    engine: str = "local",
    jobs: int = 1,
    device: str = "auto",
    mps: bool = True,
    retries: int = 1,
    address: str | None = None,
    cpus: float = 1,
    gpus: float | None = None,
    log: Log = print,
) -> dict[str, str]:
    """Run the cells that are not finished.

    engine: one of ENGINES.   jobs: cells at a time (local).   device: of each cell.   mps: jobs may share a GPU by MPS
    (local).   retries: per failed cell.
    address, cpus, gpus: of the Ray cluster, and per cell.   log: called with each line of progress.
    Returns cell name → last line of the error, for cells that failed in every attempt.
    """
    if engine not in ENGINES:
        raise FinesslError(f"--engine {engine}{nearest(engine, ENGINES) or '.'} Choose from {', '.join(ENGINES)}.")
    every = {cell.run.path: cell for cell in cells}.values()  # two cells of a table may be one run
    waiting = [cell for cell in every if not cell.run.finished()]
    if len(waiting) < len(every):
        log(f"{len(every) - len(waiting)} of {len(every)} cells are finished already")
    mistakes = Mistakes()
    for cell in waiting:
        with mistakes:
            cell.recipe.checked(source=True)
    mistakes.report()
    for cell in every:  # a run of another recipe, data or weights is refused, finished or not
        if (places := cell.run.check(cell.recipe)) and cell.run.finished():
            from finessl.runs.inputs import check_places  # loads torch

            check_places(cell.run, cell.recipe, places)
        cell.run.open(cell.recipe)
    if engine == "print":
        for cell in waiting:
            print(shlex.join(cell_command(cell, device)))
        return {}
    failed: dict[str, str] = {}
    ended = 0

    def end(cell: Cell, error: str | None) -> None:
        nonlocal ended
        ended += 1
        if error:
            failed[cell.name] = error
        log(f"[{ended}/{len(waiting)}] {cell.name}: {f'failed: {error}' if error else result(cell)}")

    if waiting and engine == "ray":
        from finessl.sweeps.engines.cluster import run_ray

        run_ray(waiting, end, log, address=address, cpus=cpus, gpus=gpus, device=device, retries=retries)
    elif waiting:
        from finessl.sweeps.engines.local import run_local

        run_local(waiting, end, log, jobs=jobs, device=device, retries=retries, mps=mps)
    return failed


def result(cell: Cell) -> str:
    meta = cell.run.meta()
    accuracy = "no test images" if meta.get("accuracy") is None else f"{meta['accuracy']:.2%}"
    return f"{accuracy} in {meta.get('seconds', 0):.0f} s"


def cell_command(cell: Cell, device: str = "auto") -> list[str]:
    return [sys.executable, "-m", "finessl", "resume", str(cell.run.path.resolve()), "--device", device]
