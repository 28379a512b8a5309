"""Names of classes, files and folders, and terminals that cannot show them."""

from __future__ import annotations

import csv
import io
import os
import re
from pathlib import Path

from fuzz.base import FAST, make_photos
from fuzz.harness import Box, kind

NAMES = (
    "[/]", "[/bold]", "[bold]", "[link=file:///etc]x[/link]", "[red", "$\\frac{1}{0$", "$x^2$", "\\alpha", "$$",
    "<script>alert(1)<|script>",
    "\"><img src=x onerror=alert(1)>", "&amp;", "'; DROP", "a\nb", "a\tb", "a\rb", "\x1b[31mred", "\x07", "\x7f",
    " ", " a", "a ", "-n", "--help",
    "a,b", "a;b", "=1+1", "@x", "%s%n", "{0}", "{{x}}", "#", "?", "*", "~", "…", "é", "e\u0301", "日本語",
    "\U0001f600", "\u202egpj", "\u200b", "x" * 120,
    "-1", "0", "None", "nan", "true", "CON", "a.b", "a..", "...", "unlabeled", "test", "runs", b"\xff", b"caf\xe9",
    b"\xed\xa0\x80", "label", "path",
    "a:b", "a|b", "a\\b", "'", '"', "`id`", "$(touch canary)", "${HOME}", "recipe.toml",
)  # fmt: skip
ENCODINGS = ("utf-8", "utf-8", "utf-8", "ascii", "cp1252", "latin-1")


def hostile_name(box: Box) -> str:
    return os.fsdecode(box.rng.choice(NAMES))


@kind("names", 10)
def names(box: Box) -> None:
    """A hostile class, file, data folder or run directory, from inspect to report."""
    rng = box.rng
    where = rng.choice(("class", "class", "class", "file", "data", "out"))
    name, encoding = hostile_name(box), rng.choice(ENCODINGS)
    data = box.folder / (name if where == "data" else "photos")
    make_photos(data, (name, "bee") if where == "class" else ("ant", "bee"), unlabeled=2, test=1)
    if where == "file":
        name = name.replace("/", "|")
        folder = data / rng.choice(("unlabeled", "labeled/ant", "test/ant"))
        content = (data / "labeled" / "ant" / "0.png").read_bytes()
        (folder / f"{name}.png").write_bytes(content)  # the name may be 0
        if rng.random() < 0.3:
            (data / "unlabeled" / f"{name}2.png").write_bytes(b"broken")
    verb = rng.choice(("inspect", "split", "train", "train", "train"))
    # A name that begins with a dash is an option unless a path comes before it.
    if verb == "inspect":
        box.run("inspect", data, encoding=encoding)
        return
    if verb == "split":
        box.run("split", data, "--out", box.folder / "split.json", encoding=encoding)
        return
    out = box.folder / (name if where == "out" else "run")
    if not box.run("train", data, "--out", out, *FAST, encoding=encoding).ok:
        box.expect(not (out / "metrics.jsonl").exists(), "refused only after it had trained")
        return
    after = rng.choice(("evaluate", "predict", "predict", "report", "report", "resume"))
    if after == "evaluate":
        box.run("evaluate", out, "--device", "cpu", encoding=encoding, must="work")
    elif after == "resume":
        box.run("resume", out, "--device", "cpu", encoding=encoding, must="work")
    elif after == "predict":
        table = box.folder / "p.csv"
        box.run("predict", out, data / "unlabeled", "--out", table, "--device", "cpu", encoding=encoding, must="work")
        with open(table, encoding="utf-8", errors="surrogateescape", newline="") as file:
            rows = list(csv.DictReader(file))
        labels = {row["label"] for row in rows}
        box.expect(bool(rows) and None not in labels, f"predictions that cannot be read back: {rows}")
    else:
        page = box.folder / "report.html"
        box.run("report", out, "--out", page, encoding=encoding, must="work")
        check_page(box, page, name)


def check_page(box: Box, page: Path, name: str) -> None:
    """Self-contained and escaped."""
    text = page.read_text(encoding="utf-8")
    box.expect("<script>alert(1)" not in text and "<img src=x" not in text, f"the name {name!r} is raw in the report")
    loaded = re.findall(r"""(?:src|href)=["']?(https?:|//)[^"'> ]*""", text)
    box.expect(not loaded, f"the report loads {loaded}")


@kind("terminals", 3)
def terminals(box: Box) -> None:
    """Verbs that only print, where little can be printed."""
    rng = box.rng
    commands = (
        ("--help",), ("list",), ("list", "methods", "--options"), ("list", "tunings"), ("train", "--help"),
        ("doctor",), ("figure",), ("paper",),
        ("inspect", box.base / "photos"), ("split", box.base / "photos"), ("evaluate", box.base / "done",
        "--device", "cpu"),
        ("predict", box.base / "done", box.base / "photos" / "unlabeled", "--device", "cpu"),
        ("predict", box.base / "done", box.base / "photos" / "unlabeled", "--device", "cpu", "--top",
        rng.choice(("1", "2", "5", "99"))),
        ("compare", box.base / "photos", "--methods", "supervised,finessl", "--engine", "print"), ("list",
        hostile_name(box)),
        ("figure", hostile_name(box), box.base / "done"), (hostile_name(box),),
    )  # fmt: skip
    command = rng.choice(commands)
    if rng.random() < 0.25:
        box.run(*command, stdout=Path("/dev/full"))
        return
    result = box.run(*command, encoding=rng.choice(ENCODINGS))
    if command[0] == "predict":
        rows = list(csv.reader(io.StringIO(result.out)))
        box.expect(len({len(row) for row in rows}) == 1, f"rows of different lengths: {rows[:2]}")
