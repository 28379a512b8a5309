"""How the cells of a grid are carried out: on this machine, on a Ray cluster, or as commands for a queue of your own.

A cell is a run directory, so every engine does the same: what is finished is left alone, what broke off goes on from its
checkpoint, and a cell that fails takes nothing with it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from finessl.errors import FinesslError, Mistakes
from finessl.recipe import Recipe
from finessl.registry import nearest
from finessl.runs.directory import RunDirectory

ENGINES = ("local", "ray", "print")


class Job(Protocol):
    """What an engine needs to know of a cell (`compare.Cell` is one)."""

    @property
    def name(self) -> str: ...
    @property
    def recipe(self) -> Recipe: ...
    @property
    def run(self) -> RunDirectory: ...


Say = Callable[[str], None]
Ended = Callable[[Job, str | None], None]  # the cell, and its error if it failed for good


def run_cells(
    cells: Sequence[Job],
    *,
    engine: str = "local",
    jobs: int = 1,
    device: str = "auto",
    retries: int = 1,
    address: str | None = None,
    cpus: float = 1,
    gpus: float | None = None,
    say: Say = print,
) -> dict[str, str]:
    """Run what is not finished; returns cell name → last line of its error, for those that failed every time."""
    if engine not in ENGINES:
        raise FinesslError(f"--engine {engine}{nearest(engine, ENGINES) or '.'} Choose from {', '.join(ENGINES)}.")
    every = {cell.run.path: cell for cell in cells}.values()  # two places of a table may be one run
    waiting = [cell for cell in every if not cell.run.finished()]
    if len(waiting) < len(every):
        say(f"{len(every) - len(waiting)} of {len(every)} cells are finished already")
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

    def end(cell: Job, error: str | None) -> None:
        nonlocal ended
        ended += 1
        if error:
            failed[cell.name] = error
        say(f"[{ended}/{len(waiting)}] {cell.name}: {f'failed: {error}' if error else result(cell)}")

    if waiting and engine == "ray":
        from finessl.sweeps.engines.cluster import run_ray

        run_ray(waiting, end, say, address=address, cpus=cpus, gpus=gpus, device=device, retries=retries)
    elif waiting:
        from finessl.sweeps.engines.local import run_local

        run_local(waiting, end, say, jobs=jobs, device=device, retries=retries)
    return failed


def result(cell: Job) -> str:
    meta = cell.run.meta()
    accuracy = "no test images" if meta.get("accuracy") is None else f"{meta['accuracy']:.2%}"
    return f"{accuracy} in {meta.get('seconds', 0):.0f} s"


def cell_command(cell: Job, device: str = "auto") -> list[str]:
    return [sys.executable, "-m", "finessl", "resume", str(cell.run.path.resolve()), "--device", device]
