"""What reaches the terminal: names are printed as they are, and no encoding ends in a traceback."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

import finessl
from finessl.cli import app, doctor
from finessl.cli.evaluate import show
from finessl.cli.train import show_summary
from finessl.inference.evaluate import Evaluation, Interval
from finessl.runtime.progress import Display, time_left
from finessl.runtime.terminal import console

Capture = pytest.CaptureFixture[str]
ODD = ("[/]", "[bold]x", "[/bold]", ":smile:", r"$\frac{1}{0$")


def finessl_command(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "finessl", *map(str, words)]
    return subprocess.run(command, capture_output=True, env={**os.environ, **environment})


def test_markup_in_names_is_printed() -> None:
    out = io.StringIO()
    table = Table(title=" ".join(ODD))
    table.add_column("class")
    for name in ODD:
        table.add_row(name)
    console(file=out, width=80).print(table)
    assert all(out.getvalue().count(name) >= 2 for name in ODD)


def test_verbs_print_markup_in_names(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x/[/y]").mkdir(parents=True)
    Path("x/[/y]/recipe.toml").write_text("seed = 0")
    show(Path("x/[/y]"), Evaluation("[/data]", 5, 0.5, Interval(0.1, 0.9), [(name, 1, 1.0) for name in ODD]))
    meta = {"accuracy": 0.5, "test": 2, "labeled": 1, "unlabeled": 1, "trained_parameters": 1, "parameters": 2}
    show_summary(Path("x/[/y]"), {**meta, "seconds": 1.0, "device": "[/]"})
    text = capsys.readouterr().out
    assert all(name in text for name in (*ODD, "x/[/y]", "[/data]"))
    error = io.StringIO()
    with Display(console(file=error)) as display:
        display.log("[/]")
    assert "[/]" in error.getvalue()


def test_mathtext_in_class_names_is_drawn(shapes: Path, tmp_path: Path, capsys: Capture) -> None:
    for name, source in zip(("[/]".replace("/", "%"), r"$\frac{1}{0$"), ("across", "down"), strict=True):
        shutil.copytree(shapes / "train" / source, tmp_path / "data" / name)
    app(["split", str(tmp_path / "data"), "-n", "2", "--out", str(tmp_path / "split.json")], standalone_mode=False)
    assert r"$\frac{1}{0$" in capsys.readouterr().out and (tmp_path / "split.png").stat().st_size > 1000


def test_doctor_names_the_extras(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    present = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "ray" else present(name))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    app(["doctor"], standalone_mode=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "pip install 'finessl[ray]'" in text
    assert "none GPU optional" in text and "missing" not in text


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_streams_without_utf8(encoding: str, shapes: Path) -> None:
    for words in (["--help"], ["list", "splits"], ["inspect", shapes]):
        done = finessl_command(*words, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
        assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr.decode()
    assert b"32x32" in done.stdout if encoding == "ascii" else b"32\xd732" in done.stdout


def test_version(capsys: Capture) -> None:
    app(["--version"], standalone_mode=False)
    assert capsys.readouterr().out == f"finessl {finessl.__version__}\n"


def test_the_package_is_typed() -> None:
    assert (Path(finessl.__file__).parent / "py.typed").exists()


def test_progress_without_a_terminal_tells_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("finessl.runtime.progress.time.monotonic", lambda: clock[0])
    out = io.StringIO()
    with Display(console(file=out, width=80)) as display:
        for done in (10, 11, 12):  # resumed at step 10: what was done before does not count
            display.update("training", done, 1000, "4 images/s")
            clock[0] += 40
    assert out.getvalue().splitlines() == [
        "training: 11/1,000  11.0 h left  4 images/s",
        "training: 12/1,000  11.0 h left  4 images/s",
    ]
    assert [time_left(10, 5, 10), time_left(10, 1, 30), time_left(1, 0, 9)] == ["20 s left", "5 min left", ""]


@pytest.mark.parametrize("words", [["train", "--help"], ["--help"], ["predict", "--help"], ["evaluate", "--help"]])
def test_help_fits_80_columns(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    app(words, standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    if words == ["--help"]:
        assert not [line for line in lines if line.startswith("  ") and line.endswith("...")], (
            "a verb's summary is cut off"
        )


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("moment", ["import", "destructor", "work"])
@pytest.mark.parametrize(("name", "status", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_ends_in_one_line(moment: str, name: str, status: int, word: str, tmp_path: Path) -> None:
    """While a module is imported, in a destructor (Python drops exceptions there), and at any other time."""
    interrupted = f"import os, signal, time\nos.kill(os.getpid(), signal.{name})\ntime.sleep(9)\n"
    (tmp_path / "slow_module.py").write_text(interrupted)
    destroyed = f"class Destroyed:\n    def __del__(self):\n        exec({interrupted!r})\nDestroyed()\ntime.sleep(9)\n"
    work = {"import": "import slow_module", "destructor": "import time\n" + destroyed, "work": interrupted}[moment]
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from finessl import __main__, cli
cli.app = lambda: exec({work!r}, {{}})
__main__.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, f"finessl: {word}.\n")


def test_step_and_time_left_are_readable_in_80_columns() -> None:
    out = io.StringIO()
    with Display(console(file=out, width=80, force_terminal=True, color_system=None)) as display:
        display.update("training", 11_900, 15_000)
        display.update("training", 12_000, 15_000, "97 images/s  test 25.00%  loss 5.895  pseudo-labels 100%")
        display.progress.refresh()
    line = next(line for line in reversed(out.getvalue().splitlines()) if "training" in line)
    assert re.search(r"12000/15000 0:00:\d\d", line) and "97 images/s  test 25.00%" in line


def test_tables_of_results_fit_80_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    """A row is a line, and a setting is named once."""
    monkeypatch.setattr(
        "finessl.runtime.terminal.console", lambda **_: console(width=80, force_terminal=True, color_system=None)
    )
    words = ["paper", "main", "--show", "--only", "cifar100", "--out", str(tmp_path)]
    app(words, standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if "±" in line]) == 24 and len([x for x in lines if "CIFAR-100, N4" in x]) == 1


def test_the_overview_of_the_paper_names_what_is_lacking_once() -> None:
    from finessl.sweeps.paper.needs import Places
    from finessl.sweeps.paper.report import overview

    table = overview(Places())
    assert table.header == ["name", "in the paper", "what", "needs"]
    assert "cifar100*" in table.rows[0][-1]
    assert len([note for note in table.notes if "--root cifar100=DIR" in note]) == 1


def test_nothing_slow_is_imported_before_ctrl_c_is_taken_over() -> None:
    """An interrupt in these imports would end in a traceback."""
    program = "import os, sys; before = set(sys.modules); import finessl.__main__; print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(finessl.__file__).parents[1],
    )
    assert set(done.stdout.split()) <= {
        "__future__", "finessl", "finessl.errors", "finessl.__main__", "finessl.runtime", "finessl.runtime.version",
    }  # fmt: skip


def test_a_name_that_the_system_refuses_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "finessl", "cache", "clear"],
        env={**os.environ, "FINESSL_CACHE": str(tmp_path / ("x" * 300))}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.startswith("finessl: ") and "too long" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_signal_during_an_import_ends_a_process_that_nobody_reads() -> None:
    """Standard error is a pipe whose reader has gone, as when the process that started this one was killed."""
    code = """
import os, signal
from types import SimpleNamespace
from finessl.__main__ import interrupt
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 2)
importing = SimpleNamespace(f_code=SimpleNamespace(co_filename="<frozen importlib._bootstrap_external>"), f_back=None)
try:
    interrupt(signal.SIGTERM, importing)
except OSError:  # as importlib does
    pass
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 128 + signal.SIGTERM
