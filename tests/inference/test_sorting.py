"""Images sorted into folders: nothing is overwritten, every class name gives a folder."""

from __future__ import annotations

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


def test_every_class_has_its_own_folder() -> None:
    classes = ["a/b", "a\\b", "..", ".hidden", "unsure", "Unsure", "", "Cat", "cat", "日本"]
    names = folder_names(classes)
    assert len({name.casefold() for name in names.values()} | {"unsure"}) == len(classes) + 1
    assert not any("/" in name or name.startswith(".") for name in names.values())
    assert names["日本"] == "日本" and names["Cat"] == "Cat"


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
