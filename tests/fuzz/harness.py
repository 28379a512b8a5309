"""Runs cases in forked processes, counts how they ended, and keeps a journal.

One process imports finessl and never uses torch. It forks a process for each case, and that one forks a process for each
command: a hang, a crash or a full memory ends a command, not the harness, and a command costs no start of Python.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import pkgutil
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.processes import NOT_BEGUN, fork, in_child, start_fork, start_python, wait

OUTCOMES = ("ok", "sentence", "traceback", "hang", "signal", "silent", "executed")
GOOD = ("ok", "sentence")
COMMAND_SECONDS = 30.0  # a command that takes longer hangs
CASE_SECONDS = 300.0
TRACES = ("Traceback (most recent call last)", "terminate called", "Exception ignored in", "Fatal Python error")


class Fault(Exception):
    """A case that did not end as promised."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome, self.detail = outcome, detail


@dataclass
class Result:
    """A command that ended: by itself, or by the signal that the case sent."""

    argv: list[str]
    rc: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.rc == 0


@dataclass
class Box:
    """What a case works with: a fresh folder, its own random numbers, and the prepared data and runs in `base`."""

    folder: Path
    base: Path
    rng: random.Random
    verbose: bool = False
    refused: bool = False  # a command ended in a sentence
    commands: Iterator[int] = field(default_factory=itertools.count)

    @property
    def canary(self) -> Path:
        """A file that exists if something in a hostile file was run."""
        return self.folder / "canary"

    def copy(self, name: str) -> Path:
        """A copy of prepared data or of a prepared run."""
        return Path(shutil.copytree(self.base / name, self.folder / name, symlinks=True))

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Fault("silent", otherwise)

    def run(
        self,
        *arguments: object,
        must: str | None = None,
        cwd: Path | None = None,
        encoding: str = "utf-8",
        stdout: Path | None = None,
        file_size: int | None = None,
        fresh: bool = False,
        interrupt: tuple[int, float] | None = None,
    ) -> Result:
        """`finessl ARGUMENTS`; a Fault unless it ends well or in a sentence. `must`: "work" or "fail". `fresh`: in a new
        Python instead of a forked one. `interrupt`: a signal and the seconds after which it is sent."""
        argv = [os.fspath(a) if isinstance(a, os.PathLike) else str(a) for a in arguments]
        log = self.folder / f"command-{next(self.commands)}"
        out, err = stdout or log.with_suffix(".out"), log.with_suffix(".err")
        start = start_python if fresh else start_fork
        pid = start(argv, cwd or self.folder, encoding, out, err, file_size)
        rc = wait(pid, COMMAND_SECONDS, interrupt)
        text = "" if stdout else out.read_bytes().decode("utf-8", "backslashreplace")
        result = Result(argv, 0 if rc is None else rc, text, err.read_bytes().decode("utf-8", "backslashreplace"))
        if self.verbose:
            print(f"$ finessl {' '.join(argv)}\n{result.out}{result.err}-> {rc}", flush=True)
        self.heads_and_loss(result, rc, must, interrupt)
        return result

    def heads_and_loss(
        self, result: Result, rc: int | None, must: str | None, interrupt: tuple[int, float] | None
    ) -> None:
        said = f"finessl {' '.join(result.argv)[:300]}: "
        tail = (result.err.strip() or result.out.strip())[-600:]
        if self.canary.exists():
            raise Fault("executed", said + "something in a file was run")
        if rc is None:
            raise Fault("hang", said + f"no end after {COMMAND_SECONDS:.0f} s\n{result.err[:1000]}")
        if any(trace in result.err or trace in result.out for trace in TRACES):
            frames = [line.strip() for line in result.err.splitlines() if "/finessl/" in line]
            if interrupt and not frames:
                return  # Python itself was still starting
            raise Fault("traceback", f"{said}{tail[-300:]}\n{'; '.join(frames[-3:])}")
        if rc < 0 and not (interrupt and -rc in (interrupt[0], signal.SIGKILL)):
            raise Fault("signal", said + f"{signal.Signals(-rc).name} {tail}")
        if interrupt and rc == NOT_BEGUN:
            return
        if rc > 0 and not tail:
            raise Fault("silent", said + f"ended with status {rc} without a word")
        if (must == "fail" and rc == 0) or (must == "work" and rc != 0):
            raise Fault("silent", said + f"should {must}, ended with status {rc}: {tail}")
        self.refused |= rc != 0


# ---- kinds of cases ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    name: str
    share: float  # of each round of cases
    function: Callable[[Box], None]


KINDS: dict[str, Kind] = {}


def kind(name: str, share: float) -> Callable[[Callable[[Box], None]], Callable[[Box], None]]:
    """Registers a generator: a function that makes one hostile case in a box and runs it there."""

    def register(function: Callable[[Box], None]) -> Callable[[Box], None]:
        KINDS[name] = Kind(name, share, function)
        return function

    return register


def schedule(kinds: list[Kind]) -> Iterator[tuple[Kind, int]]:
    """Cases without end, the kinds mixed evenly by their shares."""
    counts: Counter[str] = Counter()
    while True:
        chosen = min(kinds, key=lambda k: (counts[k.name] + 0.5) / k.share)
        yield chosen, counts[chosen.name]
        counts[chosen.name] += 1


def run_case(chosen: Kind, number: int, seed: int, base: Path, scratch: Path, verbose: bool = False) -> dict[str, Any]:
    """In a forked process: one case, from its input to its outcome."""
    folder = scratch / f"{chosen.name}-{number}"
    folder.mkdir(parents=True)
    rng = random.Random(zlib.crc32(f"{seed}/{chosen.name}/{number}".encode()))
    box = Box(folder, base, rng, verbose)
    os.environ |= {
        "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "FINESSL_CACHE": str(folder / "cache"),
        "FUZZ_CANARY": str(box.canary), "PATH": f"{base / 'bin'}:{os.environ['PATH']}",
    }  # fmt: skip
    started = time.monotonic()
    try:
        chosen.function(box)
        outcome, detail = ("sentence" if box.refused else "ok"), ""
    except Fault as fault:
        outcome, detail = fault.outcome, fault.detail
    except Exception:
        outcome, detail = "traceback", f"in the generator: {traceback.format_exc()[-1000:]}"
    if not verbose:
        remove(folder)
    return {"case": f"{chosen.name}/{number}", "outcome": outcome, "detail": detail[:1500],
            "seconds": round(time.monotonic() - started, 2)}  # fmt: skip


def remove(folder: Path) -> None:
    subprocess.run(["chmod", "-R", "u+rwX", str(folder)], stderr=subprocess.DEVNULL, check=False)
    shutil.rmtree(folder, ignore_errors=True)


# ---- the whole ----------------------------------------------------------------------------------------------------------


def main(options: Namespace) -> int:
    modules = ("images", "tables", "options", "runs", "weights", "archives", "names", "places", "kills")
    for name in (*modules, "frozen", "inference"):
        importlib.import_module(f"fuzz.{name}")  # each registers its kinds
    from fuzz.base import prepare

    import_everything()
    wanted = options.only.split(",") if options.only else [*KINDS]
    if options.case:
        wanted = [options.case.partition("/")[0]]
    if unknown := [name for name in wanted if name not in KINDS]:
        print(f"fuzz: no kind {', '.join(unknown)}; known: {', '.join(KINDS)}", file=sys.stderr)
        return 2
    kinds = [KINDS[name] for name in wanted]
    with tempfile.TemporaryDirectory(prefix="finessl-fuzz-", ignore_cleanup_errors=True) as temporary:
        scratch = Path(temporary)
        base = scratch / "base"
        in_child(lambda: prepare(base))
        if options.case:
            result = in_child(
                lambda: run_case(kinds[0], int(options.case.partition("/")[2]), options.seed, base, scratch, True)
            )
            print(json.dumps(result, indent=2))
            return int(result["outcome"] not in GOOD)
        journal = Journal(options.journal, options.seed, wanted, options.again)
        run_all(kinds, options, journal, base, scratch)
    journal.finish()
    return show(journal, wanted)


def import_everything() -> None:
    """All that a verb imports: once here instead of once per command. Nothing here may start a thread."""
    import matplotlib.pyplot  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import timm  # noqa: F401
    import typer.main

    import finessl.cli

    for part in ("analysis", "cli", "data", "frozen", "inference", "methods", "models", "training"):
        package = importlib.import_module(f"finessl.{part}")
        for module in pkgutil.walk_packages(package.__path__, f"finessl.{part}."):
            if ".scripts." in module.name:  # these are copied into exports and run there
                continue
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:  # of an extra that is not installed
                if (error.name or "finessl").startswith("finessl"):
                    raise
    # The parser is built here once, of the same parts and by the same code as in each process of a user.
    parser = typer.main.get_command(finessl.cli.app)
    typer.main.get_command = lambda app: parser
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for argv in (["list", "methods", "--options"], ["train", "--help"], ["split", "--help"]):
            sys.argv = ["finessl", *argv]
            with contextlib.suppress(SystemExit):
                runpy.run_module("finessl", run_name="__main__")
    gc.freeze()


@dataclass
class Worker:
    """A forked process with a few cases to run: fewer forks of the large process than one for each case."""

    cases: list[tuple[Kind, int]]
    reader: int
    pid: int
    content: bytes = b""
    since: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, cases: list[tuple[Kind, int]], seed: int, base: Path, scratch: Path) -> Worker:
        def work(write: Callable[[Any], None]) -> None:
            for chosen, number in cases:
                write(run_case(chosen, number, seed, base, scratch))

        reader, pid = fork(work)
        os.set_blocking(reader, False)
        return cls(list(cases), reader, pid)

    def finished(self) -> Iterator[dict[str, Any]]:
        """Cases that ended since the last call. One that ends its process or does not end is a fault of its own."""
        try:
            data = os.read(self.reader, 1 << 16)
        except BlockingIOError:
            data = None
        if data:
            *lines, self.content = (self.content + data).split(b"\n")
            for line in lines:
                del self.cases[0]
                self.since = time.monotonic()
                yield json.loads(line)
        late = time.monotonic() - self.since > CASE_SECONDS
        if data == b"" or late:
            self.stop()
            if self.cases:
                chosen, number = self.cases[0]
                outcome, detail = ("hang" if late else "signal"), "the case itself did not end well"
                yield {"case": f"{chosen.name}/{number}", "outcome": outcome, "detail": detail, "seconds": 0.0}
                self.cases.clear()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.reader)


BATCH = 12  # cases of a worker


def run_all(kinds: list[Kind], options: Namespace, journal: Journal, base: Path, scratch: Path) -> None:
    cases = (case for case in schedule(kinds) if f"{case[0].name}/{case[1]}" not in journal.rows)
    if options.cases is not None:
        cases = itertools.islice(cases, max(0, options.cases - len(journal.rows)))
    running: list[Worker] = []
    started, before, shown = time.monotonic(), journal.elapsed, 0.0
    while True:
        elapsed = before + time.monotonic() - started
        in_time = elapsed < options.minutes * 60
        while in_time and len(running) < options.jobs and (batch := list(itertools.islice(cases, BATCH))):
            running.append(Worker.start(batch, options.seed, base, scratch))
        if not running:
            break
        for worker in running:
            for row in worker.finished():
                journal.add(row, elapsed)
                if not in_time and worker.cases:
                    worker.cases.clear()
                    worker.stop()
        running = [worker for worker in running if worker.cases]
        if elapsed - shown > 30:
            shown = elapsed
            counts = Counter(row["outcome"] for row in journal.rows.values())
            print(f"{elapsed:4.0f} s  {len(journal.rows):5} cases  {dict(counts)}", file=sys.stderr, flush=True)
        time.sleep(0.005)


class Journal:
    """Finished cases, one JSON object a line: a killed run goes on behind the last of them."""

    def __init__(self, folder: Path, seed: int, kinds: list[str], again: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.about = {"seed": seed, "kinds": kinds, "revision": revision()}
        self.path = folder / f"seed-{seed}.jsonl"
        self.rows: dict[str, dict[str, Any]] = {}
        self.elapsed = 0.0
        lines = [] if again or not self.path.exists() else self.path.read_text().splitlines(keepends=True)
        content = [json.loads(line) for line in lines if line.endswith("\n")]
        if content and content[0] == self.about and content[-1] != {"finished": True}:
            for row in content[1:]:
                self.elapsed = row.pop("elapsed")
                self.rows[row["case"]] = row
            print(f"going on after {len(self.rows)} cases, {self.elapsed:.0f} s", file=sys.stderr)
            self.path.write_text("".join(line for line in lines if line.endswith("\n")))
        else:
            self.path.write_text(json.dumps(self.about) + "\n")
        self.file = open(self.path, "a")  # noqa: SIM115 - open for the whole run

    def add(self, row: dict[str, Any], elapsed: float) -> None:
        self.rows[row["case"]] = row
        self.elapsed = elapsed
        self.file.write(json.dumps({**row, "elapsed": round(elapsed, 1)}) + "\n")
        self.file.flush()
        if row["outcome"] not in GOOD:
            print(f"{row['outcome']}: {row['case']}: {row['detail'][:400]}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        self.file.write(json.dumps({"finished": True}) + "\n")
        self.file.close()


def revision() -> str:
    """Of the code: a journal of other code does not count."""
    import hashlib

    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for folder in ("finessl", "recipes", "tests/fuzz"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".toml"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def show(journal: Journal, kinds: list[str]) -> int:
    """The table of outcomes as Markdown, and the faults; 1 if there are any."""
    counts = {name: Counter[str]() for name in kinds}
    for row in journal.rows.values():
        counts[row["case"].partition("/")[0]][row["outcome"]] += 1
    print("| kind | cases | " + " | ".join(OUTCOMES) + " |\n| --- |" + " ---: |" * (len(OUTCOMES) + 1))
    total = sum(counts.values(), Counter[str]())
    for name, row in [*counts.items(), ("all", total)]:
        print(f"| {name} | {row.total():,} | " + " | ".join(f"{row[outcome]:,}" for outcome in OUTCOMES) + " |")
    faults = [row for row in journal.rows.values() if row["outcome"] not in GOOD]
    for row in faults:
        print(
            f"\n{row['outcome']}: {row['case']} (python tests/fuzz --seed {journal.about['seed']} --case {row['case']})"
        )
        print("  " + row["detail"].replace("\n", "\n  "))
    print(f"\n{len(journal.rows):,} cases in {journal.elapsed / 60:.1f} minutes, {len(faults)} faults")
    return int(bool(faults))
