"""Images sorted into folders: nothing is overwritten, every class name gives a folder."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

import pytest

from finessl.errors import FinesslError
from finessl.inference.sorting import Packed, check_target, folder_names, sort_into


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_equal_names_get_numbers(tmp_path: Path) -> None:
    files = [write(tmp_path / folder / "a.jpg", text) for folder, text in (("x", "1"), ("y", "2"), ("z", "1"))]
    write(tmp_path / "out" / "cat" / "a.jpg", "mine")
    rows = [(file, "cat") for file in files]
    assert sort_into(tmp_path / "out", rows, ["cat"]) == 3
    assert {p.name: p.read_text() for p in (tmp_path / "out" / "cat").iterdir()} == {
        "a.jpg": "mine", "a_2.jpg": "1", "a_3.jpg": "2", "a_4.jpg": "1",
    }  # fmt: skip
    assert sort_into(tmp_path / "out", rows, ["cat"]) == 0, "the same images again add nothing"


def test_links(tmp_path: Path) -> None:
    file = write(tmp_path / "x" / "a.jpg", "1")
    assert sort_into(tmp_path / "out", [(file, None)], ["cat"], link=True) == 1
    placed = tmp_path / "out" / "unsure" / "a.jpg"
    assert placed.is_symlink() and placed.read_text() == "1"
    assert sort_into(tmp_path / "out", [(file, None)], ["cat"], link=True) == 0


def test_every_class_has_its_own_folder(tmp_path: Path) -> None:
    odd = [
        "../x",
        "a/b",
        "a\\b",
        "..",
        ".hidden",
        "unsure",
        "Unsure",
        "",
        " ",
        "Cat",
        "cat",
        "CON",
        "nul.txt",
        "tail.",
        "tail",
    ]
    odd += ["é", "e\u0301", "a\0b", "line\nbreak", "a:b?", "\udcff", "\ud83d", "x" * 400, "é" * 400, "é" * 401]
    classes = [*odd, "日本", "it's"]
    names = folder_names(classes)
    places = {unicodedata.normalize("NFC", name.casefold()) for name in names.values()}
    assert len(places | {"unsure"}) == len(classes) + 1
    assert not any(set(name) & set('<>:"/\\|?*\0\n') or name.startswith(".") for name in names.values())
    assert not {"con", "nul.txt", "tail."} & places
    assert names["日本"] == "日本" and names["Cat"] == "Cat" and names["it's"] == "it's"
    photo = write(tmp_path / "a.jpg", "1")
    assert sort_into(tmp_path / "out", [(photo, label) for label in classes], classes) == len(classes)
    assert len([*(tmp_path / "out").glob("*/a.jpg")]) == len(classes), "each below its own folder, in the target"


def test_long_names_are_cut(tmp_path: Path) -> None:
    """A file system holds names of 255 bytes; a number or a temporary suffix would make them longer."""
    files = [write(tmp_path / folder / f"{'x' * 250}{end}.jpg", folder + end) for folder in "ab" for end in "12"]
    for added in (4, 0):
        assert sort_into(tmp_path / "out", [(file, None) for file in files], ["cat"]) == added
    placed = list((tmp_path / "out" / "unsure").iterdir())
    assert sorted(path.read_text() for path in placed) == ["a1", "a2", "b1", "b2"]
    assert {path.suffix for path in placed} == {".jpg"}


def test_bytes_that_are_not_text_stay_in_the_name(tmp_path: Path) -> None:
    name = os.fsdecode(b"na\xffme.jpg")
    sort_into(tmp_path / "out", [(write(tmp_path / name, "1"), None)], ["cat"])
    assert os.listdir(tmp_path / "out" / "unsure") == [name]


def test_numbers_do_not_meet_names(tmp_path: Path) -> None:
    """a.jpg twice, and files that are called as the numbered copy is; all with one content."""
    files = [write(tmp_path / place, "1") for place in ("x/a.jpg", "x/a_2.jpg", "y/a.jpg", "y/a_2.jpg", "z/a.jpg")]
    for added in (5, 0):
        assert sort_into(tmp_path / "out", [(file, "cat") for file in files], ["cat"]) == added
    assert len(list((tmp_path / "out" / "cat").iterdir())) == 5


def test_a_link_to_itself_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    check_target(tmp_path / "loop" / "x", [tmp_path / "images"])
    with pytest.raises(FinesslError, match="cannot write"):
        sort_into(tmp_path / "loop" / "x", [(Path("a.png"), "ant")], ["ant"])


def test_images_inside_shards(tmp_path: Path) -> None:
    rows = [(Packed("0_a.jpg", b"1"), "cat"), (Packed("0_a.jpg", b"2"), "cat"), (Packed("0_b.jpg", b"3"), None)]
    assert sort_into(tmp_path / "out", rows, ["cat"]) == 3
    (tmp_path / "out" / "cat" / ".0_a_2.jpg.partial").write_bytes(b"")  # left by an interrupted command
    assert sort_into(tmp_path / "out", rows, ["cat"]) == 0
    found = {str(path.relative_to(tmp_path / "out")): path.read_bytes() for path in tmp_path.rglob("*.jpg")}
    assert found == {"cat/0_a.jpg": b"1", "cat/0_a_2.jpg": b"2", "unsure/0_b.jpg": b"3"}
