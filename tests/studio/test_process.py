"""The command as a user runs it: killed at random points, refused twice, trained and stopped."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from finessl.bench.running import Running
from finessl.cli import app
from finessl.errors import FinesslError
from finessl.runs.directory import RunDirectory
from finessl.runtime.network import bind_again
from finessl.studio.events import UNLABELED, Labels
from finessl.studio.project import held, last_port, open_project
from finessl.studio.session import Studio
from finessl.studio.trained import read_trained, start_predicting
from finessl.studio.training import carried_out


def test_kill_at_random_points_loses_nothing(photos, tmp_path):
    """Whatever was answered is there after SIGKILL, single labels and whole walls; the next start goes on."""
    seed = int(time.time())
    rng, acknowledged = random.Random(seed), {}
    for _ in range(3):
        running = Running(photos, "--out", str(tmp_path / "state"))
        try:
            with (
                pytest.raises(FinesslError, match="open in another studio"),
                held(open_project(photos, tmp_path / "state")),
            ):
                pass
            names = {c["name"] for c in running.ask("/api/state")["classes"]}
            for name in ("blue", "green", "red"):
                if name not in names:
                    running.ask("/api/classes", {"add": name})
            after = rng.uniform(0.0, 1.5)
            killer = subprocess.Popen(["sh", "-c", f"sleep {after:.3f}; kill -9 {running.process.pid}"])
            pending = {}
            try:
                while True:
                    images, number = rng.sample(range(45), rng.choice([1, 1, 6])), rng.choice([0, 1, 2, None])
                    pending = dict.fromkeys(images, number)
                    one = {"image": images[0], "class": number}
                    wall = {"images": images, "class": number}
                    path, body = ("/api/label", one) if len(images) == 1 else ("/api/labels", wall)
                    assert "events" in running.ask(path, body)
                    acknowledged |= pending
            except (http.client.HTTPException, OSError):
                pass
            killer.wait()
        finally:
            running.process.kill()
            running.process.wait()
        labels = Labels(tmp_path / "state", open_project(photos, tmp_path / "state").images)
        shown = {i: None if k < 0 else int(k) for i, k in enumerate(labels.label.tolist()) if k != UNLABELED}
        labels.close()
        acknowledged |= {i: k for i, k in pending.items() if shown.get(i, -9) == k}  # written, killed before the answer
        assert shown == acknowledged, f"seed {seed}"


def test_interrupt_ends_it_and_the_labels_are_written(photos, tmp_path):
    running = Running(photos, "--out", str(tmp_path / "state"))
    try:
        running.ask("/api/classes", {"add": "red"})
        running.ask("/api/label", {"image": 0, "class": 0})
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(20) in (0, 130)
    finally:
        running.process.kill()
    assert (tmp_path / "state" / "labels.csv").read_text().splitlines()[1:] == ["blue0.jpg,red,"]


def test_the_port_is_that_of_the_last_time(photos, tmp_path):
    """A page that is open still has labels to send: it finds the studio again."""
    project = open_project(photos, tmp_path / "state")
    assert last_port(project.folder) == 0
    with bind_again("127.0.0.1", 0) as free:
        free.listen()
        project.port = free.getsockname()[1]
        with held(project):
            assert last_port(project.folder) == project.port
        with bind_again("127.0.0.1", project.port) as other:  # taken
            assert other.getsockname()[1] not in (0, project.port)
    with bind_again("127.0.0.1", last_port(project.folder)) as again:
        assert again.getsockname()[1] == project.port
    for damaged in ("{", '{"port": -1}', '{"port": "x"}', '{"port": 70000}', "[]"):
        (project.folder / "studio.json").write_text(damaged)
        assert last_port(project.folder) == 0


@pytest.mark.long
@pytest.mark.slow
def test_training_outlives_the_studio_and_resumes(photos, tmp_path):
    """A process of its own: a second studio finds it, stops it, resumes it; the run is an ordinary one."""
    project = open_project(photos, tmp_path / "state")
    with held(project):
        studio = Studio(project, "embedded")
        for i, colour in enumerate(("blue", "green", "red")):
            studio.labels.assign([15 * i, 15 * i + 1], studio.labels.find_or_add(colour), "queue")
        assert studio.trainer.state()["state"] == "idle"
        studio.trainer.start(steps=5000)
        studio.close()
        studio = Studio(project, "embedded")
        assert wait_for(lambda: studio.trainer.state()["step"] > 0, 120)
        state = studio.trainer.state()
        assert state["state"] == "running" and state["seconds_left"] > 0 and len(state["curves"]["loss"]) > 0
        with pytest.raises(FinesslError, match="running"):
            studio.trainer.start()
        studio.trainer.stop()
        assert wait_for(lambda: studio.trainer.state()["state"] == "stopped", 60)
        run = RunDirectory(tmp_path / "state" / "runs" / "001")
        assert run.checkpoints.exists()
        train = run.recipe().train  # six labels, six images per step
        assert (train.batch_size, train.lr, train.warmup) == (6, 0.03 * 6 / 32, 500)
        studio.trainer.resume()
        assert studio.trainer.state()["state"] == "running"
        assert studio.trainer.process is not None
        studio.trainer.process.kill()  # before it has trained: nothing is left to wait for
        studio.trainer.process.wait()
        studio.close()


def test_a_training_that_fails_says_why(photos, tmp_path):
    project = open_project(photos, tmp_path / "state")
    with held(project):
        studio = Studio(project, "no-such-backbone")
        for i, colour in enumerate(("blue", "green")):
            studio.labels.assign([15 * i], studio.labels.find_or_add(colour), "queue")
        studio.trainer.start(steps=3)
        assert wait_for(lambda: studio.trainer.state()["state"] == "failed", 60)
        assert "no-such-backbone" in studio.trainer.state()["message"]
        studio.close()


def wait_for(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_encoding_in_the_background(photos, tmp_path, monkeypatch):
    """Real features of the embedded backbone, in parts; the answer and the queue follow."""
    monkeypatch.setenv("FINESSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("finessl.studio.session.PAINT", 0.0)
    project = open_project(photos, tmp_path / "state")
    with held(project):
        studio = Studio(project, "embedded")
        for i, colour in enumerate(("blue", "green", "red")):
            studio.labels.assign([15 * i, 15 * i + 1], studio.labels.find_or_add(colour), "queue")
        studio.start()
        try:
            assert wait_for(lambda: studio.encoding.finished and studio.suggestions.answer is not None, 60)
            assert wait_for(lambda: len(studio.suggestions.answer.encoded.ids) == 45, 30)
            truth = np.repeat([0, 1, 2], 15)
            assert (studio.suggestions.answer.best == truth).mean() > 0.9
            assert wait_for(lambda: len(studio.suggestions.order) > 0, 30) and studio.encoding.error is None
            assert wait_for(lambda: (project.folder / "labels.csv").exists(), 5)
        finally:
            studio.close()


def test_a_finished_run_is_opened_and_asked(photos, tmp_path, monkeypatch):
    """finessl studio RUN: its data, its classes, its answers for every image."""
    monkeypatch.setenv("FINESSL_CACHE", str(tmp_path / "cache"))
    rows = [f"{colour}{i}.jpg,{colour}" for colour in ("blue", "green", "red") for i in range(2)]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label", *rows]))
    run = tmp_path / "run"
    words = [
        "quick",
        str(photos),
        "--labels",
        str(tmp_path / "labels.csv"),
        "--out",
        str(run),
        "--backbone",
        "embedded",
        "-q",
    ]
    app(words, standalone_mode=False)
    project = open_project(run, tmp_path / "state")
    assert project.data == photos and project.classes == ["blue", "green", "red"] and project.run == run
    assert start_predicting(project, run, "cpu").wait() == 0
    trained = read_trained(project, run)
    assert trained is not None and (trained.p.argmax(1) == np.repeat([0, 1, 2], 15)).mean() > 0.9
    with held(project):
        studio = Studio(project, "embedded")
        studio.suggestions.trained = trained
        assert studio.labels.counts().tolist() == [2, 2, 2]  # what the run was trained on
        assert studio.exports.view()["commands"]["predict"].startswith(f"finessl predict {run}")
        assert studio.audit.predictions() is not None
        studio.close()


def test_a_strangers_training_file_runs_nothing(client):
    """The state may come from somebody else: it names neither a program nor a process that is not ours."""
    trainer = client.studio.trainer
    trainer.folder.mkdir(parents=True, exist_ok=True)
    plan = {"backbone": "--plugin=evil.py", "tuning": "x", "steps": 3, "seconds": None, "why": ""}
    started = {"number": 1, "pid": os.getpid(), "plan": plan, "batch_size": 4, "asked_to_stop": False}
    trainer.file.write_text(json.dumps(started))
    assert client.get("/api/train")["state"] == "failed"
    assert "--plugin" not in [word.partition("=")[0] for word in trainer.command(trainer.started())]
    assert "no training" in client.post("/api/train", {"action": "stop"}, status=400)["error"]
    trainer.file.write_text(json.dumps({**started, "number": -1}))
    assert client.get("/api/train")["state"] == "idle"


def test_the_server_needs_no_backbone():
    """timm takes 200 MB and seconds; it belongs to the processes that encode, train and predict."""
    needed = "finessl.studio.server, finessl.studio.solve, finessl.inference.metrics, finessl.analysis.estimate"
    code = "import sys; import finessl.studio.server; assert 'torch' not in sys.modules; "
    code += f"import {needed}; assert 'timm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plan_without_training_says_so(tmp_path):
    """The run is the one that `quick` writes: no steps, and the plan's own words."""
    run, plan = RunDirectory(tmp_path / "001"), {"backbone": "", "tuning": "", "steps": 0, "seconds": 60.0, "why": "?"}
    assert carried_out(run, plan) == plan
    run.path.mkdir()
    run.recipe_file.write_text('format = 2\n[method]\nname = "quick"\n[model]\nbackbone = "embedded"\n')
    log = "Plan for 60 s on 2 CPU cores (--budget):\n  This is what finessl recommends.\nimages: 40\n"
    (tmp_path / "001.log").write_text(log)
    found = carried_out(run, plan)
    assert (found["backbone"], found["tuning"], found["steps"]) == ("embedded", "", 0)
    assert found["why"].endswith("This is what finessl recommends.")
