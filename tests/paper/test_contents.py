"""The paper's tables as data: every cell has a valid recipe, with the settings of the paper and the released code."""

from __future__ import annotations

import pytest

from finessl.data.sources import NAMED, SOURCES
from finessl.data.splits import SPLITS
from finessl.errors import FinesslError
from finessl.methods import METHODS
from finessl.models.aliases import BACKBONES
from finessl.models.heads import HEADS
from finessl.models.joint import part_names
from finessl.models.tuning import TUNINGS
from finessl.recipe import Recipe
from finessl.registry.options import check_options
from finessl.sweeps.paper.contents import PaperTable, Value, holds, read_table, table_names

TABLES = [
    "main", "semi-aves", "imagenet", "peft", "time", "ablations", "resnet", "settings", "long-tailed", "lp-fft", "in21k",
    "self-training", "scratch", "openssl",
]  # fmt: skip


def recipe(table: str, row: str, column: str) -> Recipe:
    contents = read_table(table)
    (line,) = (line for line in contents.rows if line.name == row)
    (place,) = (place for place in contents.columns if place.title == column)
    return contents.recipe(line, place)


def test_all_tables_come_first_in_the_papers_order() -> None:
    names = table_names()
    assert names[: len(TABLES)] == TABLES
    ours, figures = names[len(TABLES) :][:2], names[len(TABLES) :][2:]
    assert ours == ["backbones", "best"]
    assert figures[0] == "figure-1" and all(name.startswith("figure-") for name in figures)


@pytest.mark.parametrize("name", table_names())
def test_every_cell_has_a_valid_recipe(name: str) -> None:
    table = read_table(name)
    assert table.values and {row for row, _ in table.values} == {line.name for line in table.rows}
    for line, place in cells(table):
        made = table.recipe(line, place)
        assert made.data.source in NAMED and set(part_names(made.model.backbone)) <= set(BACKBONES)
        check_options("method", made.method.name, METHODS[made.method.name], made.method.options)
        check_options("tuning", made.tuning.name, TUNINGS[made.tuning.name], made.tuning.options)
        check_options("source", made.data.source, SOURCES[made.data.source], made.source.options)
        start = {n: v for n, v in made.head.options.items() if n != "init"}
        check_options("head", made.head.name, HEADS[made.head.name], start)
        kind = "per-class" if made.split.name == "auto" else made.split.name
        check_options("split", kind, SPLITS[kind], made.split.options)


def cells(table: PaperTable) -> list[tuple]:
    return [(r, c) for r in table.rows for c in table.columns if (r.name, c.title) in table.values and not r.lacks]


def test_numbers_are_those_of_the_paper() -> None:
    values = read_table("main").values
    assert values["FineSSL", "CIFAR-100, N4"] == Value("80.44 ± 0.24", 80.44, 0.24)
    assert values["PL", "CIFAR-10, N2"] == Value("74.33 ± 10.97", 74.33, 10.97)
    assert read_table("imagenet").values["FineSSL", "ImageNet, 10%"] == Value("79.21", 79.21, None)
    assert read_table("time").values["FineSSL (VPT)", "Time, # steps"] == Value("30 × 500", 15000.0, None)
    assert read_table("openssl").values["FineSSL", "OpenSSL, N5"] == Value("", None, None)
    assert read_table("settings").values["optimizer", "Settings, value"] == Value("SGD", None, None)


def test_tables_agree_where_they_repeat_an_experiment() -> None:
    """Places with equal recipes are one experiment, for which the paper gives one number wherever it prints it."""
    seen: dict[str, set[float]] = {}
    for name in table_names():
        table = read_table(name)
        for line, place in cells(table):
            mean = table.values[line.name, place.title].mean
            if place.metric == "accuracy" and mean is not None:
                seen.setdefault(table.recipe(line, place).toml(), set()).add(mean)
    repeated = [means for means in seen.values() if len(means) > 1]
    assert repeated == []
    assert len(seen) < sum(len(read_table(name).values) for name in TABLES)  # and some are indeed shared


def test_the_exceptions_of_the_appendix_and_of_the_released_code() -> None:
    usual = recipe("main", "FineSSL", "CIFAR-100, N25")
    assert (usual.train.batch_size, usual.train.mu, usual.train.steps, usual.train.lr) == (32, 1, 15000, 0.03)
    assert usual.method.options["gamma"] == 3.0 and usual.data.statistics == "dataset"
    assert (usual.tuning.name, usual.tuning.options) == ("vpt-deep", {"length": 50})

    one = recipe("main", "FineSSL", "CIFAR-10, N1")
    assert (one.train.batch_size, one.method.options["gamma"]) == (8, 1.0)
    two = recipe("main", "FineSSL", "CIFAR-10, N2")
    assert (two.train.batch_size, two.method.options["gamma"]) == (16, 3.0)
    assert recipe("main", "FixMatch", "CIFAR-10, N1").method.options == {}  # γ is FineSSL's

    large = recipe("imagenet", "SoftMatch", "ImageNet, 1%")
    assert (large.train.batch_size, large.train.mu, large.split.options) == (16, 2, {"fraction": 0.01})
    other = recipe("semi-aves", "FineSSL", "Semi-Aves, in+out")
    assert other.source.options == {"out_of_class": True} and other.method.options["gamma"] == 1.0
    assert recipe("semi-aves", "FineSSL", "Semi-Aves, in").method.options["gamma"] == 3.0
    assert recipe("ablations", "w/o DLS", "Semi-Aves, in+out").method.options["gamma"] == 1.0
    assert recipe("openssl", "FineSSL w/o DLS", "OpenSSL, N5").method.options["gamma"] == 1.0

    assert recipe("peft", "LoRA", "CIFAR-100, N4").tuning.options == {}
    assert recipe("peft", "LoRA", "Semi-Aves, in").tuning.options == {"rank": 8}
    full = recipe("lp-fft", "FixMatch w/ FFT†", "CIFAR-100, N4")
    assert (full.train.lr, full.head.options["init"]) == (1e-4, "text")
    assert recipe("lp-fft", "FineSSL w/ LP", "CIFAR-100, N4").train.lr == 0.03
    probed = recipe("lp-fft", "FineSSL w/ LP-FT", "CIFAR-100, N4")
    assert (probed.train.lr, probed.train.backbone_lr) == (0.03, 1e-4)
    assert recipe("resnet", "DebiasPL", "BN tuning, N4").model.backbone == "clip-rn50"
    scratch = recipe("time", "FixMatch (Wide ResNet)", "Time, per step")
    assert (scratch.train.steps, scratch.train.mu, scratch.train.lr) == (1024 * 1024, 7, 0.03)


def test_a_setting_from_the_command_line_comes_last() -> None:
    table = read_table("lp-fft")
    (line,) = (line for line in table.rows if line.name == "FixMatch w/ FFT")
    assert table.recipe(line, table.columns[0], {"train": {"lr": 5e-5}}).train.lr == 5e-5


def test_a_condition_holds_when_all_of_it_does() -> None:
    tree = {"a": {"x": 1}, "b": {"y": 2}}
    assert holds(tree, {"a": {"x": 1}}) and holds(tree, {"a": {"x": 1}, "b": {"y": 2}})
    assert not holds(tree, {"a": {"x": 1}, "b": {"y": 3}}) and not holds(tree, {"a": {"z": 1}})


def test_an_unknown_table_is_named() -> None:
    with pytest.raises(FinesslError, match="no table 'ablation'; did you mean ablations"):
        read_table("ablation")
