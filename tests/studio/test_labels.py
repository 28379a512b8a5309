"""labels.jsonl is the state: replay, undo, classes, damage; and what is derived from it."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from finessl.data.sources import open_dataset
from finessl.errors import FinesslError
from finessl.studio.events import NONE, UNLABELED
from finessl.studio.project import held, open_project


def lines(client) -> list[dict]:
    return [json.loads(line) for line in client.studio.labels.path.read_text().splitlines()]


def test_every_action_is_replayed(open_studio):
    client = open_studio()
    client.label(0, "blue")
    client.label(1, None)
    client.post("/api/labels", {"images": [20, 21, 22], "class": client.ids()["green"], "source": "sort"})
    client.label(0, "red")
    client.post("/api/audit", {"image": 30, "class": client.ids()["red"]})
    client.post("/api/review", {"image": 20, "action": "ignore"})
    before = client.get("/api/state")
    labels, judged, settled = client.studio.labels.label, client.studio.labels.judged, client.studio.labels.settled
    assert before["labels"] == 4 and before["none"] == 1
    again = open_studio()
    after = again.get("/api/state")
    assert after["classes"] == before["classes"] and after["events"] == before["events"]
    assert np.array_equal(again.studio.labels.label, labels) and np.array_equal(again.studio.labels.judged, judged)
    assert again.studio.labels.settled == settled == {20}


def test_events_say_who_said_what_when(client):
    client.label(0, "blue")
    client.label(0, None)
    first, second = lines(client)[-2:]
    assert (
        first["image"] == "blue0.jpg" and (first["from"], first["to"]) == (None, "blue") and first["source"] == "queue"
    )
    assert (second["from"], second["to"]) == ("blue", "") and second["action"] == first["action"] + 1
    assert first["time"].endswith("Z") and "by" in first


def test_undo_is_an_event_and_goes_back_to_the_beginning(open_studio):
    client = open_studio()
    client.label(0, "blue")
    client.post("/api/labels", {"images": [0, 1, 2], "class": client.ids()["red"]})
    client.post("/api/audit", {"image": 30, "class": None})
    size = client.studio.labels.path.stat().st_size
    assert client.post("/api/undo")["undone"] == {"images": [30], "class": None, "source": "audit"}
    assert client.post("/api/undo")["undone"]["images"] == [0, 1, 2]
    assert client.studio.labels.label[:3].tolist() == [client.ids()["blue"], UNLABELED, UNLABELED]
    assert client.studio.labels.path.stat().st_size > size and lines(client)[-1]["undo"]
    client = open_studio()
    assert client.studio.labels.label[:3].tolist() == [client.ids()["blue"], UNLABELED, UNLABELED]
    assert client.post("/api/undo")["labels"] == 0 and client.post("/api/undo")["undone"] is None
    assert not (client.studio.labels.judged != UNLABELED).any()


def test_classes_are_renamed_and_merged(open_studio):
    client = open_studio()
    ids = client.ids()
    client.label(0, "blue")
    client.label(1, "green")
    client.post("/api/classes", {"rename": ids["blue"], "name": "Azure"})
    client.post("/api/classes", {"merge": ids["green"], "into": ids["blue"]})
    state = client.post("/api/classes", {"add": "green"})  # the name is free again
    assert [(c["name"], c["labels"]) for c in state["classes"]] == [("Azure", 2), ("red", 0), ("green", 0)]
    client = open_studio()
    assert client.get("/api/state")["classes"] == state["classes"]
    assert client.post("/api/undo")["undone"]["images"] == [1]  # past the merge
    assert client.studio.labels.label[:2].tolist() == [ids["blue"], UNLABELED]
    assert (
        client.post("/api/classes", {"rename": ids["green"], "name": "x"}) and client.ids()["x"] == ids["blue"]
    )  # merged


def test_a_cut_last_line_is_dropped(open_studio):
    client = open_studio()
    client.label(0, "blue")
    client.label(1, "red")
    path = client.studio.labels.path
    client.studio.close()
    path.write_bytes(path.read_bytes()[:-9])
    client = open_studio()
    assert client.get("/api/state")["labels"] == 1
    client.label(2, "red")
    assert open_studio().get("/api/state")["labels"] == 2


def test_damage_elsewhere_is_an_error_that_names_the_line(open_studio, tmp_path, photos):
    client = open_studio()
    client.label(0, "blue")
    client.studio.close()
    path = client.studio.labels.path
    path.write_text(path.read_text().replace('"class": "green"', '"class": "gr'))
    with pytest.raises(FinesslError, match=r"labels\.jsonl is damaged: line 2"):
        open_studio()


def test_a_full_disk_changes_nothing(client, monkeypatch):
    client.label(0, "blue")
    size = client.studio.labels.path.stat().st_size

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert "No space left" in client.post("/api/label", {"image": 1, "class": 0}, status=400)["error"]
    assert client.studio.labels.path.stat().st_size == size and client.get("/api/state")["labels"] == 1
    client.label(1, "red")
    assert client.get("/api/state")["labels"] == 2


def test_labels_csv_is_what_train_and_quick_take(client, photos):
    for i, name in ((0, "blue"), (20, "green"), (40, "red"), (5, None)):
        client.label(i, name)
    client.studio.save_labels()
    dataset = open_dataset(photos, labels=str(client.studio.project.labels_file))
    assert dataset.classes == ["blue", "green", "red"] and int(dataset.given.sum()) == 3
    rows = list(csv.DictReader(client.studio.project.labels_file.open()))
    assert [row["note"] for row in rows if not row["label"]] == ["none of these classes"]


def test_images_are_found_by_name_when_the_folder_changes(photos, open_studio, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(photos, data)
    client = open_studio(data)
    client.label(3, "blue")
    client.label(10, "blue")
    thumb = client.http.get("/thumb/3").content
    gone, stays = client.studio.images.key(3), client.studio.images.key(10)
    old = client.studio.identity
    client.studio.close()
    (data / gone).unlink()
    shutil.copy(data / stays, data / "a-new-one.jpg")
    client = open_studio(data)
    labeled = [client.studio.images.key(int(i)) for i in np.flatnonzero(client.studio.labels.label >= 0)]
    assert labeled == [stays] and "1 labels name images" in client.studio.notes()[0]
    assert client.studio.identity != old
    assert client.studio.thumbnails.start[3] == -1 and client.http.get("/thumb/3").content != thumb


def test_a_second_studio_is_refused(client, photos):
    with (
        pytest.raises(FinesslError, match="open in another studio"),
        held(open_project(photos, client.studio.project.folder)),
    ):
        pass


def test_two_tabs_agree(client):
    """Both see the same queue and every label, whoever gave it."""
    one, other = client.get("/api/queue?n=4"), client.get("/api/queue?n=4")
    assert one == other
    first = one["items"][0]["id"]
    client.label(first, "red")
    assert client.get("/api/state")["labels"] == 1
    left = [item["id"] for item in client.get("/api/queue?n=4")["items"]]
    assert left[:2] == [item["id"] for item in one["items"][1:3]] and first not in left
    client.label(first, "blue")  # the other tab was slower: the last word counts, and undo brings the first back
    assert client.post("/api/undo")["undone"]["class"] == client.ids()["red"]


def test_labels_that_came_with_the_data(photos, open_studio, tmp_path):
    data = tmp_path / "data"
    for name in ("blue", "red"):
        (data / "labeled" / name).mkdir(parents=True)
        shutil.copy(photos / f"{name}0.jpg", data / "labeled" / name)
    (data / "unlabeled").mkdir()
    shutil.copy(photos / "green0.jpg", data / "unlabeled")
    client = open_studio(data, classes=False)
    state = client.get("/api/state")
    assert [(c["name"], c["labels"]) for c in state["classes"]] == [("blue", 1), ("red", 1)]
    client.label(0, "red")
    assert client.post("/api/undo")["undone"] and client.post("/api/undo")["undone"] is None  # what the data says stays
    events = client.get("/api/state")["events"]
    assert open_studio(data).get("/api/state")["events"] == events  # read once


def test_tables_and_class_folders(photos, open_studio, tmp_path):
    table = tmp_path / "images.csv"
    table.write_text("path,label,split\n" + "".join(
        f"{photos / f'{name}{i}.jpg'},{name if i == 0 else ''},{'test' if i == 2 else 'train'}\n"
        for name in ("blue", "red") for i in range(3)
    ))  # fmt: skip
    client = open_studio(table, tmp_path / "a", classes=False)
    state = client.get("/api/state")
    assert state["project"]["images"] == 4 and state["labels"] == 2 and client.http.get("/thumb/0").status_code == 200
    for name in ("blue", "red"):
        (tmp_path / "data" / name).mkdir(parents=True)
        shutil.copy(photos / f"{name}0.jpg", tmp_path / "data" / name)
    state = open_studio(tmp_path / "data", tmp_path / "b", classes=False).get("/api/state")
    assert [c["name"] for c in state["classes"]] == ["blue", "red"] and state["labels"] == 0  # names, no labels


def test_what_cannot_be_opened(photos, tmp_path):
    with pytest.raises(FinesslError, match="inside"):
        open_project(photos, photos / "state")
    with pytest.raises(FinesslError, match="folder or a table"):
        open_project("sample")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FinesslError, match="no images"):
        open_project(tmp_path / "empty")
    assert open_project(photos).folder == photos.with_name("photos.finessl")


def test_one_image_and_no_class(photos, open_studio, tmp_path):
    (tmp_path / "one").mkdir()
    shutil.copy(photos / "red0.jpg", tmp_path / "one")
    client = open_studio(tmp_path / "one", classes=False)
    assert len(client.get("/api/queue")["items"]) == 1 and client.get("/api/grid")["total"] == 1
    client.post("/api/classes", {"add": "red"})
    client.label(0, "red")
    assert client.get("/api/queue") == {"items": [], "left": 0} and client.get("/api/audit")["image"] is None
    for kind in ("doubtful", "disagree", "none", "confused"):
        assert client.get(f"/api/review?kind={kind}")["items"] == []


def test_names_that_are_not_utf8(photos, open_studio, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in (b"gr\xfcn.jpg", b"rot.jpg"):
        Path(os.fsdecode(os.path.join(os.fsencode(data), name))).write_bytes((photos / "red0.jpg").read_bytes())
    client = open_studio(data)
    names = [item["name"] for item in client.get("/api/grid?sort=name")["items"]]
    assert "gr\\xfcn.jpg" in names
    client.label(names.index("gr\\xfcn.jpg"), "green")
    assert open_studio(data).get("/api/state")["labels"] == 1


def test_none_is_not_a_class(client):
    client.add_features()
    client.label(0, None)
    assert client.studio.labels.label[0] == NONE
    assert client.get("/api/grid?label=yes")["items"][0]["label"] == "none"
