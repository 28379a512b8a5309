"""NVIDIA's MPS around the jobs of a grid, with a stand-in for its daemon."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from finessl.recipe import Recipe
from finessl.runtime import mps
from finessl.sweeps import compare
from finessl.sweeps.engines import local

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a program of Linux")

# `-d` leaves a process behind and writes its id, as the daemon does; `quit` on standard input ends it.
DAEMON = """#!{python}
import os, signal, subprocess, sys
pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
file = os.path.join(pipes, "nvidia-cuda-mps-control.pid")
with open({calls!r}, "a") as calls:
    calls.write(" ".join(sys.argv[1:]) or sys.stdin.readline().strip())
    calls.write(" " + os.environ.get("CUDA_VISIBLE_DEVICES", "all") + "\\n")
if sys.argv[1:] == ["-d"]:
    if {broken!r}:
        sys.exit("cannot start: " + {broken!r})
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
    open(file, "w").write(str(process.pid))
elif not {deaf!r}:
    os.kill(int(open(file).read()), signal.SIGTERM)
"""


class Fake:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.calls_file = folder / "calls.txt"
        monkeypatch.setattr(mps, "TRIAL", "pass")
        monkeypatch.setattr(mps, "PATIENCE", 20.0)
        monkeypatch.delenv(mps.PIPES, raising=False)

    def install(self, broken: str = "", deaf: bool = False) -> None:
        program = self.folder / "bin" / mps.CONTROL
        program.parent.mkdir()
        program.write_text(
            DAEMON.format(python=sys.executable, calls=str(self.calls_file), broken=broken, deaf=deaf), encoding="utf-8"
        )
        program.chmod(0o755)
        self.monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(tmp_path, monkeypatch)


def running(process: int) -> bool:
    """A process that has ended and that nobody has waited for does not run."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def wait_until_ended(process: int) -> None:
    end = time.monotonic() + 20
    while running(process):
        assert time.monotonic() < end, "the daemon is still running"
        time.sleep(0.05)


@pytest.mark.parametrize("deaf", [False, True])
def test_a_daemon_of_its_own_is_started_and_stopped(fake: Fake, deaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # is for the jobs alone: the daemon would renumber the GPUs
    fake.install(deaf=deaf)
    said: list[str] = []
    with mps.shared_gpu(said.append) as variables:
        pipes = Path(variables[mps.PIPES])
        assert pipes.is_dir() and Path(variables[mps.LOGS]).is_dir() and len(str(pipes)) < 60
        daemon = mps.daemon_process(pipes)
        assert running(daemon) and fake.calls() == ["-d all"]
    wait_until_ended(daemon)
    assert not pipes.parent.exists() and said == [] and fake.calls() == ["-d all", "quit 3"]


def test_it_is_stopped_after_an_error(fake: Fake) -> None:
    fake.install()
    with pytest.raises(KeyboardInterrupt), mps.shared_gpu(print) as variables:
        daemon = mps.daemon_process(Path(variables[mps.PIPES]))
        raise KeyboardInterrupt
    wait_until_ended(daemon)


def test_a_daemon_that_cannot_start_is_a_note(fake: Fake) -> None:
    fake.install(broken="no permission")
    said: list[str] = []
    with mps.shared_gpu(said.append) as variables:
        assert variables == {}
    assert said == ["NVIDIA MPS does not work here (cannot start: no permission): jobs take turns on the GPU"]


def test_a_daemon_that_no_program_can_use_is_a_note(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "TRIAL", "import sys; sys.exit('CUDA error 805')")
    fake.install()
    said: list[str] = []
    with mps.shared_gpu(said.append) as variables:
        assert variables == {} and fake.calls() == ["-d all", "quit all"]
    assert said == ["NVIDIA MPS does not work here (CUDA error 805): jobs take turns on the GPU"]


def test_without_it_or_with_anothers_nothing_is_started(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(fake.folder))
        with mps.shared_gpu(print) as variables:
            assert variables == {}
    fake.install()
    monkeypatch.setenv(mps.PIPES, "/somewhere")
    with mps.shared_gpu(print) as variables:
        assert variables == {} and fake.calls() == []


def test_when_jobs_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert local.share_a_gpu(3, "auto") and local.share_a_gpu(3, "cuda") and local.share_a_gpu(2, "cuda:1")
    assert not local.share_a_gpu(2, "auto")  # one each
    assert not local.share_a_gpu(3, "cpu") and not local.share_a_gpu(1, "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not local.share_a_gpu(3, "auto")


@pytest.mark.parametrize(("jobs", "allowed"), [(2, True), (2, False), (1, True)])
def test_the_jobs_of_a_grid_get_it(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, allowed: bool
) -> None:
    fake.install()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cells = compare.make_cells(Recipe.read(None, {"data.source": "sample"}), {"seed": [0, 1]}, tmp_path / "runs")
    for cell in cells:
        cell.run.open(cell.recipe)
    names = f"[os.environ.get(name, '') for name in ({mps.PIPES!r}, 'FINESSL_SHARED_PIXELS')]"
    write = f"import os, pathlib, sys; pathlib.Path(sys.argv[1], 'seen.txt').write_text(' '.join({names}))"
    local.run_local(
        cells, lambda cell, error: None, print, jobs=jobs, device="cuda", mps=allowed,
        command=lambda cell, device: [sys.executable, "-c", write, str(cell.run.path)],
    )  # fmt: skip
    seen = {(cell.run.path / "seen.txt").read_text() for cell in cells}
    if jobs == 2 and allowed:
        (text,) = seen
        assert text.endswith("pipes 1") and fake.calls() == ["-d all", "quit 0"]
    else:
        assert seen == {" 1" if jobs == 2 else " "} and fake.calls() == []
