"""Training from the studio: an ordinary `finessl train` in a process of its own, in FOLDER/runs/NUMBER.

The process belongs to nobody: it goes on when the page or the studio is closed, and a studio that is opened again finds
it by FOLDER/runs/training.json. Labels are copied at its start, so labeling goes on meanwhile. SIGTERM stops it at a
checkpoint; the same command resumes it.
"""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from filelock import FileLock, Timeout
from pydantic import Field
from typing_extensions import TypedDict

from finessl.data.dataset import readable
from finessl.errors import FinesslError
from finessl.recipe.small_batch import small_batch
from finessl.runs.directory import RunDirectory
from finessl.runtime.files import DamagedFile, read_json, write_atomically, write_json, writing
from finessl.studio.events import Labels
from finessl.studio.features import Encoding
from finessl.studio.project import Project, labels_csv, training_table

POINTS = 400  # of a curve
STEPS = (30, 20_000)  # fewest and most
BUDGET = 900.0  # seconds


class Plan(TypedDict):
    backbone: str
    tuning: str
    steps: int
    seconds: float | None
    why: str


class Started(TypedDict):
    """training.json. It may come from a stranger: it holds no path and no command, only what makes one."""

    number: Annotated[int, Field(ge=1, le=10**6)]
    pid: Annotated[int, Field(ge=2)]
    plan: Plan
    batch_size: Annotated[int, Field(ge=1, le=1024)]
    asked_to_stop: bool


class Trainer:
    def __init__(self, project: Project, labels: Labels, encoding: Encoding) -> None:
        self.project, self.labels, self.encoding = project, labels, encoding
        self.folder = project.folder / "runs"
        self.file = self.folder / "training.json"
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()
        self.curve_cache: tuple[tuple[str, int], dict[str, list[Any]], int] | None = None

    # ---- what there is ----------------------------------------------------------------------------------------------

    def started(self) -> Started | None:
        """The last training; None where there is none, or its file is damaged (the runs are all there)."""
        try:
            return read_json(self.file, Started) if self.file.is_file() else None
        except DamagedFile:
            return None

    def run(self) -> Path | None:
        """A finished run: the last one trained here, or the one that the studio was opened with."""
        started = self.started()
        if started is not None and self.directory(started).finished():
            return self.directory(started).path
        return self.project.run

    def alive(self, started: Started) -> bool:
        if self.process is not None and self.process.pid == started["pid"]:
            return self.process.poll() is None
        try:
            os.kill(started["pid"], 0)
        except OSError:
            return False
        lock = self.directory(started).lock_file  # the number may be another process by now
        if not lock.exists():
            return False
        try:
            with FileLock(lock, timeout=0):
                return False
        except Timeout:
            return True

    def state(self) -> dict[str, Any]:
        started = self.started()
        if started is None:
            return {
                "state": "idle", "plan": self.plan(), "step": 0, "steps": 0, "seconds_left": None,
                "curves": {}, "run": None, "message": self.obstacle() or "",
            }  # fmt: skip
        run = self.directory(started)
        curves, step = self.curves(run)
        plan = carried_out(run, started["plan"])
        steps = plan["steps"]
        found = "finished" if run.finished() else "running" if self.alive(started) else "stopped"
        message = last_line(log_of(run.path)) if found == "running" and not step else ""
        if found == "stopped" and not started["asked_to_stop"]:
            found, message = "failed", last_line(log_of(run.path))
        return {
            "state": found,
            "plan": plan,
            "step": steps if found == "finished" else step,
            "steps": steps,
            "seconds_left": self.seconds_left(run, step, steps) if found == "running" else None,
            "curves": curves,
            "run": readable(str(run.path)),
            "message": message,
        }

    def curves(self, run: RunDirectory) -> tuple[dict[str, list[Any]], int]:
        """step, loss, used (share of unlabeled images in use) and accuracy on test images, thinned out."""
        size = run.metrics_file.stat().st_size if run.metrics_file.exists() else 0
        key = (str(run.path), size)
        if self.curve_cache is None or self.curve_cache[0] != key:
            rows = [row for row in run.metrics() if row["kind"] == "train"] if size else []
            tests = {row["step"]: row["accuracy"] for row in run.metrics() if row["kind"] == "test"} if size else {}
            step = rows[-1]["step"] if rows else 0
            kept = [rows[i] for i in np.unique(np.linspace(0, len(rows) - 1, POINTS).astype(int))] if rows else []
            curves: dict[str, list[Any]] = {"step": [row["step"] for row in kept]}
            curves["loss"] = [finite(row.get("loss")) for row in kept]
            curves["used"] = [finite(row.get("used")) for row in kept]
            curves["accuracy"] = [finite(tests.get(row["step"])) for row in kept]
            self.curve_cache = (key, curves, step)
        return self.curve_cache[1], self.curve_cache[2]

    def seconds_left(self, run: RunDirectory, step: int, steps: int) -> float | None:
        """From the time that the steps so far took."""
        if step < 2 or not run.metrics_file.exists():
            return None
        begun = run.recipe_file.stat().st_mtime
        return round((steps - step) * (run.metrics_file.stat().st_mtime - begun) / step, 1)

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def obstacle(self) -> str | None:
        """Why training cannot start."""
        with self.labels.lock:
            counts = self.labels.counts()
        if (counts > 0).sum() < 2:
            return "Training needs labels of two classes or more."
        if not self.encoding.backbone:
            return self.encoding.error or "The backbone is being loaded; try again in a moment."
        return None

    def plan(self, budget: float | None = None, steps: int | None = None) -> Plan:
        """What training would do. `finessl train` plans by itself unless steps or a backbone are given."""
        backbone, rate = self.encoding.backbone or "", self.encoding.rate
        if steps is None and self.encoding.asked == "auto":
            minutes = f"{(budget or BUDGET) / 60:.3g} minutes"
            why = f"backbone, tuning and steps are chosen to end within {minutes}, after a few seconds of measuring"
            return {"backbone": backbone, "tuning": "", "steps": 0, "seconds": budget or BUDGET, "why": why}
        per_step = 4 * self.batch_size() * 3 / rate if rate else None  # images per step, forward and backward
        why = "as many steps as were asked for"
        if steps is None:
            steps, why = 500, "a first short run; the speed of this machine is not measured yet"
            if per_step:
                steps = int(np.clip((budget or BUDGET) / per_step, *STEPS))
                why = f"as many steps as fit {(budget or BUDGET) / 60:.3g} minutes, by the speed of {backbone} on this machine"
        seconds = round(steps * per_step, 1) if per_step else None
        return {"backbone": backbone, "tuning": "adaptformer", "steps": steps, "seconds": seconds, "why": why}

    def batch_size(self) -> int:
        """Labeled images per step: no more than there are."""
        return int(np.clip((self.labels.label >= 0).sum(), 4, 32))

    # ---- actions ----------------------------------------------------------------------------------------------------

    def start(self, budget: float | None = None, steps: int | None = None) -> None:
        with self.lock:
            started = self.started()
            if started is not None and self.alive(started):
                raise FinesslError("a training is running; stop it first.")
            if reason := self.obstacle():
                raise FinesslError(reason)
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                number = 1 + max((int(p.stem) for p in self.folder.iterdir() if p.stem.isdecimal()), default=0)
                text = training_table(self.labels) if self.project.is_table else labels_csv(self.labels)
                write_atomically(self.folder / f"{number:03}.csv", text)
            plan = self.plan(budget, steps)
            size = self.batch_size()
            self.launch({"number": number, "pid": 2, "plan": plan, "batch_size": size, "asked_to_stop": False})

    def resume(self) -> None:
        with self.lock:
            started = self.started()
            if started is None:
                raise FinesslError("there is no training to resume.")
            if self.alive(started) or self.directory(started).finished():
                raise FinesslError("the training runs already, or is finished.")
            self.launch(started)

    def directory(self, started: Started) -> RunDirectory:
        return RunDirectory(self.folder / f"{started['number']:03}")

    def command(self, started: Started) -> list[str]:
        """The words after `finessl`."""
        run, plan, encoding = self.directory(started).path, started["plan"], self.encoding
        labels = str(run.with_name(f"{run.name}.csv"))
        data = [labels] if self.project.is_table else [str(self.project.data), f"--labels={labels}"]
        words = ["train", *data, f"--out={run}", "--checkpoint-seconds=30", f"--device={encoding.device}"]
        files = encoding.files
        if plan["steps"]:
            weights = files.get(plan["backbone"])
            words += [f"--backbone={plan['backbone']}", f"--tuning={plan['tuning']}", f"--steps={plan['steps']}"]
            words += [f"--batch-size={started['batch_size']}", "--head-init=class-mean"]
            rates = small_batch(started["batch_size"], plan["steps"])
            words += [f"--set={name}={value}" for name, value in rates.items()]
            words += [f"--weights={weights}"] if weights else []
        else:
            words += [f"--budget={plan['seconds']:.0f}s"]
            words += ["--weights=" + ",".join(f"{name}={file}" for name, file in files.items())] if files else []
        return words

    def launch(self, started: Started) -> None:
        with writing(self.folder), open(log_of(self.directory(started).path), "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "finessl", *self.command(started)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the studio's terminal is not for it
                env=os.environ | {"COLUMNS": "1000"},  # one sentence per line of the log
            )
            write_json(self.file, {**started, "pid": self.process.pid, "asked_to_stop": False})

    def stop(self) -> None:
        with self.lock:
            started = self.started()
            if started is None or not self.alive(started):
                raise FinesslError("no training is running.")
            write_json(self.file, {**started, "asked_to_stop": True})
            os.kill(started["pid"], signal.SIGTERM)
            for _ in range(100):  # it writes a checkpoint first; a later look tells when that takes longer
                if not self.alive(started):
                    break
                time.sleep(0.05)

    def command_line(self) -> str | None:
        started = self.started()
        return None if started is None else shlex.join(["finessl", *self.command(started)])


def carried_out(run: RunDirectory, plan: Plan) -> Plan:
    """The plan with what the run's recipe says, once it has one. No steps: frozen features are the result."""
    if not run.recipe_file.exists():
        return plan
    recipe = run.recipe()
    why = planned_lines(log_of(run.path)) or plan["why"]
    tuning, steps = (recipe.tuning.name, recipe.train.steps) if recipe.method.name != "quick" else ("", 0)
    known = {"backbone": recipe.model.backbone, "tuning": tuning, "steps": steps, "why": why}
    return {**plan, **known}  # type: ignore[typeddict-item]


def planned_lines(log: Path) -> str:
    """What `finessl train` has said of its plan."""
    try:
        text = log.read_bytes()[:8000].decode("utf-8", "replace")
    except OSError:
        return ""
    _, found, rest = text.partition("Plan for ")
    lines = rest.replace("\r", "\n").splitlines()
    kept = [lines[0], *itertools.takewhile(lambda line: line.startswith("  "), lines[1:])] if found and lines else []
    return " ".join(line.strip() for line in kept)


def log_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def last_line(path: Path) -> str:
    """Of a log; the reason why a process has ended."""
    try:
        text = path.read_bytes()[-4000:].decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("finessl:")), lines[-1] if lines else "")[:500]


def finite(value: Any) -> float | None:
    return round(float(value), 5) if isinstance(value, (int, float)) and np.isfinite(value) else None
