"""Processes of the harness: commands in forks of this process or in a Python of their own, with limits and a time to end."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOT_BEGUN = 70  # status of a command that a signal ended before it began
MEMORY = 6 * 2**30  # bytes that a command may take beyond what the harness itself holds


def start_fork(argv: list[str], cwd: Path, encoding: str, out: Path, err: Path, file_size: int | None) -> int:
    """`python -m finessl ARGV` in a fork of this process, where finessl is imported already."""
    if pid := os.fork():
        return pid
    code = NOT_BEGUN
    try:
        os.setpgid(0, 0)
        os.chdir(cwd)
        for target, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_CREAT), (2, os.O_WRONLY | os.O_CREAT)):
            os.dup2(os.open((os.devnull, out, err)[target], flags, 0o644), target)
        streams = [os.fdopen(number, "rb" if number == 0 else "wb", closefd=False) for number in range(3)]
        sys.stdin = io.TextIOWrapper(streams[0])
        sys.stdout = io.TextIOWrapper(streams[1], encoding=encoding, errors="strict")
        sys.stderr = io.TextIOWrapper(streams[2], encoding, "backslashreplace", line_buffering=True)
        faulthandler.register(signal.SIGUSR1, 2)  # says where a command hangs
        limit(file_size)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.argv = ["finessl", *argv]
        code = as_python()
    finally:
        os._exit(code)


def as_python() -> int:
    """Run the module and end as the interpreter does."""
    try:
        runpy.run_module("finessl", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        code = 120
    sys.stderr.flush()
    return code


def start_python(argv: list[str], cwd: Path, encoding: str, out: Path, err: Path, file_size: int | None) -> int:
    """The same in a new Python."""
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    with open(out, "wb") as output, open(err, "wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "finessl", *argv],
            cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, process_group=0,
        ).pid  # fmt: skip


def limit(file_size: int | None) -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def wait(pid: int, seconds: float, interrupt: tuple[int, float] | None = None) -> int | None:
    """The exit status, negative for a signal; None after killing a process that did not end in time."""
    started = time.monotonic()
    pause = 0.001
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # what the command left running
                os.killpg(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status)
        now = time.monotonic() - started
        if interrupt and now >= interrupt[1]:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if interrupt[0] == signal.SIGKILL else os.kill)(pid, interrupt[0])
            interrupt = None
        if now > seconds:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.2)
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(min(pause, interrupt[1] - now) if interrupt else pause)
        pause = min(pause * 1.5, 0.02)


def in_child(function: Callable[[], Any]) -> Any:
    """The result of a function that runs in a forked process."""
    reader, _ = fork(lambda write: write(function()))
    with open(reader) as pipe:
        line = pipe.readline()
    if not line:
        raise RuntimeError("the forked process ended without a result")
    return json.loads(line)


def fork(function: Callable[[Callable[[Any], None]], None]) -> tuple[int, int]:
    """A process that runs a function of `write`; its pipe, with a line of JSON for each call, and its number."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        return reader, pid
    try:
        os.setpgid(0, 0)
        with open(writer, "w", buffering=1) as pipe:
            function(lambda value: print(json.dumps(value), file=pipe))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
