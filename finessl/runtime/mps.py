"""NVIDIA's Multi-Process Service (MPS): kernels of several processes run on one GPU at the same time.

Without it processes take turns, and a GPU that one of them leaves idle (between kernels, during set-up or evaluation) is idle.
The daemon is started with folders of its own, so that it meets no other one, is tried with a small program, and is stopped at
the end. Caveat: a process that ends with a fault on the GPU takes the others with it; cells of a grid are then tried again.

Reference: https://docs.nvidia.com/deploy/mps/
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from finessl.runtime.callbacks import Log

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PATIENCE = 30.0  # seconds for the daemon to start, answer or stop

# A context on the first device, which makes the daemon start its server: what fails there would fail in every job.
TRIAL = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
for call in (lambda: cuda.cuInit(0), lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
             lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)):
    if status := call():
        sys.exit(f"CUDA error {status}")
"""


@contextlib.contextmanager
def shared_gpu(log: Log) -> Iterator[dict[str, str]]:
    """Environment variables with which processes share a GPU; none where MPS is not installed, does not work or is run by
    somebody else already, who has set them.   log: called with a line where it does not work."""
    control = shutil.which(CONTROL)
    if control is None or os.environ.get(PIPES):
        yield {}
        return
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="mps-", dir=short_folder(), ignore_cleanup_errors=True)
            )
        )
        variables = {PIPES: str(folder / "pipes"), LOGS: str(folder / "logs")}
        for path in variables.values():
            Path(path).mkdir()
        stack.callback(stop, control, variables)  # before the folder is removed
        if why := start(control, variables):
            log(f"NVIDIA MPS does not work here ({why}): jobs take turns on the GPU")
            stack.close()
            yield {}
            return
        yield variables


def short_folder() -> str | None:
    """Where the daemon's sockets may lie; their paths are limited to about 100 characters. None: the system's choice."""
    return "/tmp" if os.access("/tmp", os.W_OK) else None


def start(control: str, variables: Mapping[str, str]) -> str | None:
    """Start the daemon and try it. Returns why it does not work, or None."""
    own = {**os.environ, **variables}
    every = {name: value for name, value in own.items() if name != "CUDA_VISIBLE_DEVICES"}  # it would renumber them
    try:
        for command, environment in (([control, "-d"], every), ([sys.executable, "-c", TRIAL], own)):
            with tempfile.TemporaryFile() as said:  # a daemon may keep a pipe open for ever
                ended = subprocess.run(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=PATIENCE
                )  # fmt: skip
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()
            if ended.returncode:
                return lines[-1] if lines else f"{Path(command[0]).name} ended with status {ended.returncode}"
    except subprocess.TimeoutExpired:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    return None


def stop(control: str, variables: Mapping[str, str]) -> None:
    """Stop the daemon; by a signal if it does not listen."""
    daemon = daemon_process(Path(variables[PIPES]))
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [control], env={**os.environ, **variables}, input=b"quit\n", stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=PATIENCE,
        )  # fmt: skip
    end = time.monotonic() + 2
    while daemon and alive(daemon):
        if time.monotonic() > end:
            with contextlib.suppress(OSError):
                os.kill(daemon, signal.SIGTERM)
            return
        time.sleep(0.05)


def daemon_process(pipes: Path) -> int:
    """Process id of the daemon, which it writes to its folder; 0 if it has not."""
    try:
        return int((pipes / f"{CONTROL}.pid").read_text())
    except (OSError, ValueError):
        return 0


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True
