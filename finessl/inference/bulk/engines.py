"""Workers that carry out parts: processes of this machine, or actors of a Ray cluster.

An engine gives (number of the part, why it failed or None) as parts end. Parts are handed out one by one, so that a slow
machine takes fewer of them, and a part's file is written by its worker: predictions do not pass through this process.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing.connection import wait as wait_for
from typing import Any

import torch

from finessl.errors import FinesslError
from finessl.inference.bulk.parts import Part
from finessl.inference.bulk.worker import Settings, run_part, start_worker

KEPT = "the parts that are written are kept."
Task = tuple[int, Part, str]  # number, what, to which file
Ended = tuple[int, str | None]  # number, why it failed


def run_local(settings: Settings, tasks: list[Task], jobs: int) -> Iterator[Ended]:
    """Processes of this machine."""
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        yield from run_here(settings, tasks)
        return
    context = multiprocessing.get_context("spawn")
    counter = context.Value("i", 0)
    pool = ProcessPoolExecutor(jobs, context, start_process, (settings, counter))
    left, running = iter(tasks), dict[Future[str | None], int]()

    def submit(some_tasks: Iterable[Task]) -> None:
        for number, part, target in some_tasks:
            running[pool.submit(run_part, part, target)] = number

    try:
        submit(itertools.islice(left, 2 * jobs))  # file lists travel when they are needed
        while running:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield running.pop(future), future.result()
            submit(itertools.islice(left, len(ended)))
    except BrokenProcessPool as error:
        raise FinesslError(
            "a worker process ended unexpectedly (out of memory?). Run the same command again, with fewer --jobs: "
            f"{KEPT}"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_here(settings: Settings, tasks: list[Task]) -> Iterator[Ended]:
    """This process."""
    threads, folder = torch.get_num_threads(), os.getcwd()
    try:
        if tasks:
            start_worker(settings)
        for number, part, target in tasks:
            yield number, run_part(part, target)
    finally:
        torch.set_num_threads(threads)
        os.chdir(folder)


def start_process(settings: Settings, counter: Any) -> None:
    with counter.get_lock():
        number, counter.value = counter.value, counter.value + 1
    threading.Thread(target=end_with_parent, daemon=True).start()
    with contextlib.suppress(OSError, AttributeError):
        os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which lets the parts end
    start_worker(settings, number)


def end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


class RayWorker:
    def __init__(self, settings: Settings) -> None:
        start_worker(settings)

    def run(self, part: Part, target: str) -> str | None:
        return run_part(part, target)


def run_ray(settings: Settings, tasks: list[Task], jobs: int | None, address: str | None) -> Iterator[Ended]:
    """Actors of a Ray cluster: `jobs` of them, by default one for each of its cores, or GPUs."""
    from finessl.runtime.ray import connected

    if not tasks:
        return
    with connected(address) as ray:
        have = ray.cluster_resources()
        share = 1.0 if settings.device == "cuda" else 0.0
        slots = int(have.get("GPU", 0) if share else have.get("CPU", 1))
        workers = max(min(jobs or slots, slots, len(tasks)), 1)
        worker = ray.remote(RayWorker).options(num_cpus=1, num_gpus=share, max_restarts=3, max_task_retries=3)
        actors = [worker.remote(replace(settings, threads=1)) for _ in range(workers)]
        left, running = iter(tasks), {}

        def submit(actor: Any) -> None:
            for number, part, target in left:
                running[actor.run.remote(part, target)] = (number, actor)
                return

        for actor in actors:
            submit(actor)
        while running:
            (reference, *_), _ = ray.wait(list(running), num_returns=1)
            number, actor = running.pop(reference)
            try:
                yield number, ray.get(reference)
            except ray.exceptions.RayError as lost:
                yield number, f"its worker was lost: {str(lost).splitlines()[0]}"
            submit(actor)
