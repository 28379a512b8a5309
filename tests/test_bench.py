"""The benchmarks run, and what they print adds up."""

from __future__ import annotations

import json

import pytest

from finessl.cli import app

SMALL = ["--backbone", "embedded", "--batch-size", "2", "--repeats", "1", "--device", "cpu", "--json"]


def output(capsys: pytest.CaptureFixture[str], *words: str) -> object:
    app([*words], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


def test_step(capsys: pytest.CaptureFixture[str]) -> None:
    result = output(capsys, "bench", "step", *SMALL)
    assert isinstance(result, dict)
    assert set(result["parts_ms"]) == {"data", "weak forward", "forward", "method", "backward", "update"}
    assert all(value > 0 for value in result["parts_ms"].values())
    assert result["images"] == 2 + 2 + 2 * 2 and 0 < result["share_of_floor"] < 1
    # 9 blocks of width 192 on 65 tokens, MLP 384; prompts of 50; the last block for the class token alone
    blocks = 8 * (65 * 192 * 192 * 4 + 2 * 65 * 192 * 384 + 2 * 65 * (65 + 50) * 192)
    last = 2 * 65 * 192 * 192 + 2 * 192 * 192 + 2 * 192 * 384 + 2 * (65 + 50) * 192
    flops = 2 * (64 * 48 * 192 + blocks + last) * (2 + 2 * 6)
    assert result["floor_ms"] == pytest.approx(1000 * flops / (result["matmul_tflops"] * 1e12), rel=0.1)


def test_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    rows = output(capsys, "bench", "tuning", *SMALL, "--tunings", "vpt-deep,linear")
    assert isinstance(rows, list) and [row["name"] for row in rows] == ["vpt-deep", "linear"]
    assert rows[0]["trained"] - rows[1]["trained"] == 9 * 50 * 192


def test_tuning_that_does_not_fit_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    app(["bench", "tuning", *SMALL[:-1], "--tunings", "bn,linear"], standalone_mode=False)
    text = capsys.readouterr().out
    assert "bn: left out" in text and "linear" in text


def test_augment(capsys: pytest.CaptureFixture[str]) -> None:
    rows = output(capsys, "bench", "augment", "--size", "32", "--batch", "4", "--device", "cpu", "--json")
    assert isinstance(rows, list) and [row["view"] for row in rows] == ["weak", "strong"]
    assert all(row["ours"] > 0 and row["pillow"] > 0 for row in rows)
