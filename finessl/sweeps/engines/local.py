"""Cells as processes on this machine, with live status lines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.live import Live
from rich.text import Text

from finessl.data.cache import SHARED
from finessl.runtime.callbacks import Log
from finessl.runtime.files import writing
from finessl.runtime.machine import usable_cores
from finessl.runtime.mps import shared_gpu
from finessl.runtime.terminal import console
from finessl.sweeps.compare import Cell
from finessl.sweeps.engines import Ended, cell_command

Command = Callable[[Cell, str], list[str]]
PATIENCE = 60.0  # seconds for a cell to write its last checkpoint


@dataclass
class Running:
    cell: Cell
    tries: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]  # error.log; removed unless the cell fails

    @property
    def log(self) -> Path:
        return self.cell.run.path / "error.log"

    def last_line(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return lines[-1] if lines else "starting"
        return "starting"

    def end(self, code: int) -> str | None:
        """The error, or None."""
        self.output.close()
        if code == 0:
            self.log.unlink(missing_ok=True)
            return None
        line = self.last_line()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}" if line == "starting" else line


def run_local(
    cells: Sequence[Cell],
    ended: Ended,
    log: Log,
    *,
    jobs: int = 1,
    device: str = "auto",
    retries: int = 1,
    mps: bool = True,
    command: Command = cell_command,
) -> None:
    """Run each cell in a process, `jobs` at a time. Cores, and several GPUs, are divided among the jobs; jobs on one GPU share
    it by MPS where that works (`mps`). Decoded images and compiled kernels are kept once, in files.

    A failed cell goes to the end of the queue, up to `retries` times. Ctrl-C lets running cells write a checkpoint.
    """
    waiting = deque((cell, 0) for cell in cells)
    running: dict[int, Running] = {}
    jobs = min(jobs, max(len(cells), 1))
    environments = [environment(slot, jobs, device) for slot in range(jobs)]
    with contextlib.ExitStack() as stack:
        show = stack.enter_context(status_lines())
        stack.enter_context(terminated_is_interrupted())
        if mps and share_a_gpu(jobs, device):
            more = stack.enter_context(shared_gpu(log))
            environments = [{**own, **more} for own in environments]
        try:
            while waiting or running:
                for slot in range(jobs):
                    if slot not in running and waiting:
                        running[slot] = start(*waiting.popleft(), command, device, environments[slot])
                time.sleep(0.05)
                for slot, job in list(running.items()):
                    if (code := job.process.poll()) is None:
                        continue
                    del running[slot]
                    error = job.end(code)
                    if error and job.tries < retries:
                        log(f"{job.cell.name}: failed, will be tried again: {error}")
                        waiting.append((job.cell, job.tries + 1))
                    else:
                        ended(job.cell, error)
                show(running.values(), len(waiting))
        finally:
            stop(list(running.values()))


def start(cell: Cell, tries: int, command: Command, device: str, variables: dict[str, str]) -> Running:
    with writing(cell.run.path):
        output = open(cell.run.path / "error.log", "wb")  # noqa: SIM115 - closed when the process has ended
    process = subprocess.Popen(
        command(cell, device),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=variables,
        start_new_session=True,  # Ctrl-C reaches only this process, which then stops the others in order
    )
    return Running(cell, tries, process, output)


def stop(running: list[Running]) -> None:
    """Terminate the cells, which write a checkpoint, and kill those that take over PATIENCE seconds."""
    for job in running:
        job.process.terminate()
    for job in running:
        try:
            job.process.wait(PATIENCE)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            job.process.kill()
            job.process.wait()
        job.output.close()


def environment(slot: int, jobs: int, device: str) -> dict[str, str]:
    """Environment of a job: its share of the cores; with several jobs and several GPUs, one of those."""
    cores = usable_cores()
    threads = max(cores // jobs, 1)
    with contextlib.suppress(ValueError):  # keep a lower limit that the user has set
        threads = min(threads, int(os.environ.get("OMP_NUM_THREADS", threads)))
    # PyTorch's compiler would start a process per core in every job.
    compilers = {"TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", str(threads))}
    variables = {**os.environ, **compilers, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    if jobs > 1:
        variables[SHARED] = "1"
    if jobs > 1 and device in ("auto", "cuda"):
        visible = visible_gpus()
        if len(visible) > 1:
            variables["CUDA_VISIBLE_DEVICES"] = visible[slot % len(visible)]
    return variables


def share_a_gpu(jobs: int, device: str) -> bool:
    """Are there more jobs than GPUs?"""
    if jobs < 2 or device.split(":")[0] not in ("auto", "cuda"):
        return False
    return ":" in device or jobs > len(visible_gpus()) > 0


def visible_gpus() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


@contextlib.contextmanager
def status_lines() -> Iterator[Callable[[Iterable[Running], int], None]]:
    """A function that shows a line per running cell on a terminal, and nothing elsewhere."""
    output = console(stderr=True)
    with (
        Live(console=output, transient=True, refresh_per_second=4)
        if output.is_terminal
        else contextlib.nullcontext() as live
    ):

        def show(running: Iterable[Running], waiting: int) -> None:
            if live:
                lines = [f"{job.cell.name}: {job.last_line()}" for job in running]
                lines += [f"{waiting} waiting"] if waiting else []
                live.update(Text("\n".join(lines), style="dim", no_wrap=True, overflow="ellipsis"))

        yield show


@contextlib.contextmanager
def terminated_is_interrupted() -> Iterator[None]:
    """SIGTERM ends the grid like Ctrl-C, so that no cell is left running."""

    def interrupt(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
