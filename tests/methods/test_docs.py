"""docs/methods.md: its example runs unchanged, and it names every method, option and default."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from methods_cases import task

from finessl.methods import METHODS, create
from finessl.methods.base import Batch, HeadOutputs, Outputs
from finessl.methods.finessl import FORMS, Switches
from finessl.registry.options import options_of

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def example() -> str:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    return code


def section(name: str) -> str:
    """The text from the method's heading to the next."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    return next(text for title, text in zip(parts[1::2], parts[2::2], strict=True) if name in title.split(", "))


def test_example_is_short() -> None:
    assert len(example().strip().splitlines()) <= 60


def test_example_trains_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_method.py").write_text(example(), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(METHODS, "entries", dict(METHODS.entries))
    monkeypatch.setitem(sys.modules, "my_method", None)  # removed after the test
    del sys.modules["my_method"]
    __import__("my_method")  # registers itself
    assert "relative-threshold" in METHODS
    method = create("relative-threshold", task(steps=60), {"ratio": "1.0", "momentum": "0.5"})

    # three Gaussian blobs in 8 dimensions, 2 labels each, a linear head
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(3, 8, generator=generator)
    truth = torch.arange(60) % 3
    features = centres[truth] + torch.randn(60, 8, generator=generator)
    head = torch.nn.Linear(8, 3)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    losses, used = [], 0.0
    for step in range(60):
        method.before_step(step)
        index = torch.randint(0, 60, (12,), generator=generator)
        noise = torch.randn(24, 8, generator=generator)
        with torch.no_grad():
            weak = HeadOutputs(head(features[index]))
        strong = HeadOutputs(head(features[index].repeat(2, 1) + noise))
        result = method(Outputs(HeadOutputs(head(features[:6])), weak, strong), Batch(truth[:6], index))
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        losses.append(float(result.statistics["loss_labeled"]))
        used += float(result.statistics["used"])
    assert losses[-1] < losses[0] / 4 and 0 < used < 60
    assert (head(features).argmax(1) == truth).float().mean() > 0.8
    other = create("relative-threshold", task(steps=60))
    other.load_state_dict(method.state_dict())
    assert torch.equal(other.confidence.value, method.confidence.value)  # type: ignore[union-attr]
    assert float(other.ramp) == 1.0


@pytest.mark.parametrize("name", METHODS.names())
def test_page_names_every_option_and_default(name: str) -> None:
    text = section(name)
    for option, parameter in options_of(METHODS[name]).items():
        assert written_default(text, name, option) == shown(parameter.default), option


def test_page_gives_the_switches_of_both_forms() -> None:
    for name in Switches._fields:
        released, paper = (getattr(FORMS[form], name) for form in ("released", "paper"))
        assert re.search(
            rf"^\| `{name}` \| `form` \| `?{shown(released)}`? \| `?{shown(paper)}`? \|", section("finessl"), re.M
        )


def written_default(text: str, method: str, option: str) -> str | None:
    """The default that the page gives: in a table's row of the option, or as "`option` symbol = default"."""
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "option":
            header = cells
        elif line.startswith(f"| `{option}`"):
            return cells[header.index(f"`{method}`") if f"`{method}`" in header else 1].strip("`")
    found = re.search(rf"`{option}`[^`=|]*=\s*([\w.]*\w)", text)
    return found and found[1]


def shown(default: Any) -> str:
    """As the page writes it."""
    if default == ():
        return "–"
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)


def test_page_links_to_the_papers() -> None:
    for name in METHODS.names():
        assert name == "supervised" or "https://arxiv.org/abs/" in section(name), name
