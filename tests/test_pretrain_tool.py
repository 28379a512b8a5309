"""tools/pretrain_embedded.py at toy size on the CPU: tiny student, tiny random teacher, random images."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer

TOOLS = Path(__file__).resolve().parent.parent / "tools"
if not TOOLS.is_dir():
    pytest.skip("the tools are not part of an installed package", allow_module_level=True)
sys.path.insert(0, str(TOOLS))

import pretrain_embedded as tool  # noqa: E402
import pretrain_report  # noqa: E402
import pretrain_views as views  # noqa: E402

CPU = torch.device("cpu")
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 0}
CONFIG = {"vit": VIT, "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
RECIPE = dataclasses.replace(tool.SMOKE, teacher_size=56, steps=5, per_class=None)


@pytest.fixture()
def data(tmp_path: Path) -> Path:
    """Three classes of six (train) and four (test) random images each."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 4)):
        (tmp_path / part).mkdir()
        for name in ("ant", "bee", "cow"):
            stack = rng.integers(0, 256, (count * 32, 32, 3), dtype=np.uint8)
            Image.fromarray(stack).save(tmp_path / part / f"{name}.webp", lossless=True)
    return tmp_path


def run(data: Path, recipe: tool.Recipe, minutes: float = 5.0) -> tuple[dict, Path]:
    out = data / "out" / "student.safetensors"
    args = argparse.Namespace(
        data=data, sample=data, dinov2=None, clip=None, out=out, minutes=minutes, device="cpu", seed=0
    )
    return tool.pretrain(args, recipe, CONFIG), out


def test_a_run_writes_weights_that_timm_loads_and_a_record(data: Path) -> None:
    record, out = run(data, RECIPE)
    weights = load_file(out)
    assert all(value.dtype == torch.float16 for value in weights.values())
    VisionTransformer(**VIT).load_state_dict(weights)
    assert record == json.loads(out.with_suffix(".training.json").read_text())
    # 2 chunks fill the buffer, then one before steps 0, 2 and 4
    assert (record["steps"], record["student_views"], record["teacher_views"]) == (5, 5 * 8, 5 * 8)
    for figure in ("knn", "linear", "prototypes_4"):
        assert 0 <= record["reports"][-1][f"sample_{figure}"] <= 100


def test_the_clock_ends_the_run_and_reports_come_in_between(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(tool, "time", SimpleNamespace(time=lambda: 0.5 * next(ticks)))  # half a second per look
    record, _ = run(data, dataclasses.replace(RECIPE, steps=10**9), minutes=1)
    assert len(record["reports"]) == 4  # at a quarter, half and three quarters of the time, and at the end
    assert 1.0 <= record["minutes"] < 1.1 and record["steps"] > 5


def test_weights_that_blow_up_are_replaced_by_the_last_good_ones(data: Path, capsys: pytest.CaptureFixture) -> None:
    _, out = run(data, dataclasses.replace(RECIPE, lr=1e30, warmup=1e-9))
    assert "not finite: back" in capsys.readouterr().out
    assert all(value.isfinite().all() for value in load_file(out).values())


def test_training_lowers_every_loss() -> None:
    torch.manual_seed(0)
    answers = tool.Answers(torch.randn(8, 6), torch.randn(8, 16, 6), torch.randn(8, 5))
    student = tool.Distillation(VisionTransformer(**VIT), answers, temperature=0.1)
    optimiser = torch.optim.AdamW(student.parameters(), lr=3e-3)
    images, history = torch.randn(8, 3, 32, 32), []
    for _ in range(60):
        losses = student(images, answers)
        optimiser.zero_grad()
        losses.sum().backward()
        optimiser.step()
        history.append(losses.detach())
    assert (history[-1] < 0.5 * history[0]).all(), (history[0], history[-1])


def test_relation_is_the_divergence_between_neighbour_distributions() -> None:
    torch.manual_seed(0)
    answers = tool.Answers(torch.randn(4, 6), torch.randn(4, 16, 6), None)
    student = tool.Distillation(VisionTransformer(**VIT).eval(), answers, temperature=0.1)
    images = torch.randn(4, 3, 32, 32)

    def rows(features: np.ndarray) -> list[np.ndarray]:
        unit = features / np.linalg.norm(features, axis=1, keepdims=True)
        scores = [np.exp(np.delete(unit @ unit[i], i) / 0.1) for i in range(4)]
        return [s / s.sum() for s in scores]

    token = student.vit(images).detach().numpy()
    p, q = rows(answers.token.numpy()), rows(token)
    expected = np.mean([(a * np.log(a / b)).sum() for a, b in zip(p, q, strict=True)])
    assert float(student(images, answers)[1].detach()) == pytest.approx(expected, rel=1e-3)


def test_clip_counts_only_where_it_was_asked() -> None:
    torch.manual_seed(0)
    some = torch.randn(4, 5)
    some[2:] = 0
    answers = tool.Answers(torch.randn(4, 6), torch.randn(4, 16, 6), some)
    student = tool.Distillation(VisionTransformer(**VIT).eval(), answers, temperature=0.1)
    images = torch.randn(4, 3, 32, 32)
    predicted = student.heads[2](student.vit(images))
    expected = 1 - torch.cosine_similarity(predicted[:2], some[:2]).mean()
    assert float(student(images, answers)[3].detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


def test_student_and_teacher_see_the_same_view() -> None:
    torch.manual_seed(0)
    ramp = torch.arange(32).view(1, 1, 1, 32) * 6 + torch.arange(32).view(1, 1, 32, 1)  # smooth: resampling is exact
    images = (ramp + torch.tensor([0, 10, 20]).view(1, 3, 1, 1)).expand(64, 3, 32, 32).to(torch.uint8)
    small, large = views.fresh_views(images, 224, torch.float32)
    shrunk = torch.nn.functional.adaptive_avg_pool2d(large, 32)
    assert (small - shrunk).abs().mean() < 0.01
    assert small.std(0).mean() > 0.05  # and the views differ from one another


def test_neutral_colours_change_nothing_and_grey_is_grey() -> None:
    torch.manual_seed(0)
    images = torch.rand(200, 3, 4, 4)
    changed = views.recolour(images, views.colour_maps(200, 0.0, CPU))
    same = (changed - images).abs().amax((1, 2, 3)) < 1e-5
    grey = (changed - changed[:, :1]).abs().amax((1, 2, 3)) < 1e-5
    assert (same | grey).all() and 5 <= int(grey.sum()) <= 40  # a tenth


def test_the_buffer_flips_patches_with_the_image_and_forgets_the_oldest() -> None:
    torch.manual_seed(0)
    images = torch.rand(6, 3, 32, 32)
    images[:, :, :, :16], images[:, :, :, 16:] = 0.2, 0.8  # dark left, bright right: survives any colour change
    side = torch.tensor([-1.0, 1.0]).repeat_interleave(2).repeat(4).view(1, 16, 1)  # a 4x4 grid, left -1, right +1
    buffer = tool.Buffer(4, tool.Answers(torch.zeros(6, 1), side.expand(6, 16, 1), None), CPU)
    buffer.write(images, tool.Answers(torch.arange(6.0).view(6, 1), side.expand(6, 16, 1), None))
    drawn, answers = buffer.draw(64)
    bright_right = drawn[:, :, :, 24].mean((1, 2)) > drawn[:, :, :, 8].mean((1, 2))
    assert torch.equal(bright_right, answers.patches[:, 3, 0] > 0) and 10 < int(bright_right.sum()) < 54
    assert buffer.written == 6 and set(answers.token.flatten().tolist()) == {2.0, 3.0, 4.0, 5.0}


def test_answers_are_standardised_and_pooled_to_the_students_grid() -> None:
    torch.manual_seed(0)
    teacher = tool.load_teacher("", None, 56)
    teachers = tool.Teachers([teacher, tool.load_teacher("", None, 56)], RECIPE, 2, CPU)
    chunk = torch.rand(8, 3, 56, 56)
    teachers.calibrate([chunk])
    answers = teachers(chunk)
    assert answers.token.mean(0).abs().max() < 1e-3 and (answers.token.std(0) - 1).abs().max() < 1e-2
    assert answers.patches.shape == (8, 4, 32)
    assert answers.clip is not None and (answers.clip[2:] == 0).all() and (answers.clip[:2] != 0).any()
    tokens = teacher.forward_features(views.normalise(chunk, tool.IMAGENET))[:, 1:].view(8, 4, 4, 32)
    corner = tokens[:, :2, :2].mean((1, 2))
    mean, std = teachers.moments[1]
    assert torch.allclose(answers.patches[:, 0], (corner - mean) / std, atol=1e-4)


def test_packed_weights_are_unpacked(tmp_path: Path) -> None:
    packed = {"a": torch.tensor([[1, -2], [3, 4]], dtype=torch.int8), "a.scale": torch.tensor([0.5, 2.0])}
    save_file(packed | {"b": torch.ones(2).half()}, tmp_path / "w.safetensors")
    weights = tool.read_weights(tmp_path / "w.safetensors")
    assert weights["a"].tolist() == [[0.5, -1.0], [6.0, 8.0]] and sorted(weights) == ["a", "b"]


def test_the_learning_rate_warms_up_and_ends_at_zero() -> None:
    recipe = tool.Recipe(lr=1.0, warmup=0.1)
    assert tool.learning_rate(0.05, recipe) == pytest.approx(0.5)
    assert tool.learning_rate(0.1, recipe) == pytest.approx(1.0)
    assert tool.learning_rate(0.55, recipe) == pytest.approx(0.5)  # half of the cosine
    assert tool.learning_rate(1.2, recipe) == pytest.approx(0.0)


def test_probes_on_separable_features() -> None:
    torch.manual_seed(0)
    labels = torch.arange(3).repeat(20)
    bank = torch.nn.functional.normalize(torch.eye(3, 8)[labels] + 0.05 * torch.randn(60, 8), dim=1)
    wrong = (labels + 1) % 3
    for probe in (pretrain_report.knn, pretrain_report.linear, pretrain_report.prototypes):
        assert probe(bank, labels, bank, labels) == 100
        assert probe(bank, labels, bank, wrong) == 0


def test_knn_weighs_votes_by_similarity() -> None:
    # one very near neighbour of class 1 (cosine 1) against two of class 0 (cosine 0.8): exp(0.2 / 0.07) = 17 > 2
    bank = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.8, -0.6]])
    assert math.exp(0.2 / 0.07) > 2
    assert pretrain_report.knn(bank, torch.tensor([1, 0, 0]), bank[:1], torch.tensor([1])) == 100
