"""Queue, sort, review, audit and export, on features that are made up."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import shutil
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from finessl.data.sources import open_dataset
from finessl.studio.events import UNLABELED
from finessl.studio.server import Server
from finessl.studio.suggest import KEPT
from finessl.studio.trained import Trained


@pytest.fixture
def learned(client):
    """With features, and three labels of each colour."""
    for colour in ("blue", "green", "red"):
        for i in [i for i in range(45) if client.truth(i) == colour][:3]:
            client.label(i, colour)
    client.add_features()
    return client


def test_suggestions_follow_the_labels(learned):
    item = learned.get("/api/queue")["items"][0]
    best = item["suggestions"][0]
    assert best["class"] == learned.ids()[learned.truth(item["id"])] and best["p"] > 0.5
    assert len(item["nearest"]) == 4 and item["nearest"][0]["class"] == best["class"] and item["why"]
    state = learned.get("/api/state")
    assert state["accuracy"]["kind"] == "cross-validated" and state["accuracy"]["n"] == 9
    assert 0 <= state["accuracy"]["low"] <= state["accuracy"]["value"] <= state["accuracy"]["high"] <= 1


def test_without_features_labeling_works(client):
    seen = set()
    for _ in range(45):
        item = client.get("/api/queue?n=1")["items"][0]
        seen.add(item["id"])
        client.label(item["id"], client.truth(item["id"]))
    assert len(seen) == 45 and client.get("/api/queue")["left"] == 0
    assert client.get("/api/state")["accuracy"]["kind"] is None


def test_herding_asks_for_each_colour_first(client):
    client.add_features(0.05)
    found = client.get("/api/queue?n=3")["items"]
    assert {client.truth(item["id"]) for item in found} == {"blue", "green", "red"}


def test_the_next_three_stay_when_the_order_changes(learned):
    before = [item["id"] for item in learned.get("/api/queue?n=8")["items"]]
    learned.studio.suggestions.order = learned.studio.suggestions.order[::-1]
    after = [item["id"] for item in learned.get("/api/queue?n=8")["items"]]
    assert after[:KEPT] == before[:KEPT] and after[KEPT:] != before[KEPT:]
    skipped = learned.get(f"/api/queue?n=2&after={before[0]},{before[1]}")["items"]
    assert skipped[0]["id"] == before[2]


def test_grid_filters_and_sorts(learned):
    ids = learned.ids()
    everything = learned.get("/api/grid?limit=1000")
    assert everything["total"] == 45
    red = learned.get(f"/api/grid?class={ids['red']}&label=none")
    assert red["total"] == 12 and all(learned.truth(item["id"]) == "red" for item in red["items"])
    p = [item["p"] for item in red["items"]]
    assert p == sorted(p, reverse=True)
    assert learned.get("/api/grid?label=yes")["total"] == 9 == learned.get("/api/grid?source=queue")["total"]
    assert learned.get("/api/grid?q=RED1&sort=name")["total"] == 6  # red1, red10 … red14
    page = learned.get("/api/grid?sort=name&offset=40&limit=10")
    assert [item["id"] for item in page["items"]] == [40, 41, 42, 43, 44]
    low, high = learned.get("/api/grid?max=0.5")["total"], learned.get("/api/grid?min=0.5")["total"]
    assert low + high >= 45
    doubt = learned.get("/api/grid?sort=doubt&limit=45")["items"]
    assert doubt[0]["p"] <= doubt[-1]["p"]


def test_review_finds_a_wrong_label_and_settles_it(learned):
    wrong = next(i for i in range(45) if learned.truth(i) == "red" and learned.studio.labels.label[i] == UNLABELED)
    learned.label(wrong, "blue")
    learned.studio.suggestions.update()
    item = learned.get("/api/review?kind=doubtful")["items"][0]
    assert item["id"] == wrong and item["predicted"] == learned.ids()["red"] and "red" in item["why"]
    pair = learned.get("/api/review?kind=confused")["items"]
    assert any(wrong in (item["id"], item["pair"]) for item in pair)
    learned.post("/api/review", {"image": wrong, "action": "accept"})
    assert wrong not in [item["id"] for item in learned.get("/api/review?kind=doubtful")["items"]]
    learned.post("/api/undo")
    learned.post("/api/review", {"image": wrong, "action": "change", "class": learned.ids()["red"]})
    assert learned.studio.labels.label[wrong] == learned.ids()["red"]
    learned.studio.suggestions.update()
    assert not learned.get("/api/review?kind=doubtful")["items"]


def test_review_of_images_of_no_class(learned):
    items = learned.get("/api/review?kind=none")["items"]
    assert items and all(item["label"] is None for item in items)
    learned.post("/api/review", {"image": items[0]["id"], "action": "accept", "class": None})
    assert learned.get("/api/state")["none"] == 1
    assert isinstance(learned.get("/api/review?kind=disagree")["items"], list)


def test_audit_hides_the_prediction_and_measures(learned):
    answered = []
    for number in range(12):
        view = learned.get("/api/audit")
        assert set(view["image"]) == {"id", "name"}  # nothing of the prediction
        image = view["image"]["id"]
        colour = learned.truth(image) if number else "red"
        found = learned.post("/api/audit", {"image": image, "class": learned.ids()[colour]})
        assert found["answered"] == number + 1 and found["right"] == (found["predicted"] == learned.ids()[colour])
        answered.append(image)
    accuracy = learned.get("/api/state")["accuracy"]
    assert (
        accuracy["kind"] == "audited"
        and accuracy["n"] == 12
        and accuracy["low"] < accuracy["value"] <= accuracy["high"]
    )
    assert learned.get("/api/state")["labels"] == 9  # answers are no labels
    queue = {item["id"] for item in learned.get("/api/queue?n=20")["items"]}
    assert not queue & set(answered)
    assert "audit" in learned.post("/api/label", {"image": answered[0], "class": 0}, status=400)["error"]
    batch = learned.post("/api/labels", {"images": [answered[0], min(queue)], "class": 0})
    assert batch["skipped"] == 1 and batch["labels"] == 10
    assert "label" in learned.post("/api/audit", {"image": min(queue), "class": 0}, status=400)["error"]


def test_a_trained_classifier_joins_the_suggestions_and_is_audited(learned):
    """Here one that calls everything red: suggestions take both into account, the audit measures it alone."""
    before = learned.get(f"/api/grid?class={learned.ids()['red']}&label=none")["total"]
    p = np.tile(np.array([0.02, 0.96, 0.02], np.float16), (45, 1))
    learned.studio.suggestions.trained = Trained(Path("runs/001"), ["blue", "red", "gone"], p)
    learned.studio.suggestions.update()
    answer, frozen = learned.studio.suggestions.answer, learned.studio.suggestions.frozen
    assert np.allclose(answer.p.sum(1), 1, atol=1e-3) and (answer.p[:, 2] > frozen.p[:, 2] - 1e-3).mean() > 0.6
    assert learned.get(f"/api/grid?class={learned.ids()['red']}&label=none")["total"] >= before
    item = learned.get("/api/review?kind=disagree")["items"][0]
    assert item["predicted"] == learned.ids()["red"] and "trained classifier says red" in item["why"]
    for _ in range(12):
        image = learned.get("/api/audit")["image"]["id"]
        found = learned.post("/api/audit", {"image": image, "class": learned.ids()[learned.truth(image)]})
        assert found["predicted"] == learned.ids()["red"]
    accuracy = learned.get("/api/state")["accuracy"]
    assert accuracy["value"] < 0.7 and "trained classifier" in accuracy["how"]


def test_pictures(learned, photos):
    for path in ("thumb", "image"):
        answer = learned.http.get(f"/{path}/0")
        assert answer.headers["content-type"] == "image/jpeg" and "no-cache" in answer.headers["cache-control"]
        tag = answer.headers["etag"]
        assert learned.http.get(f"/{path}/0", headers={"if-none-match": tag}).status_code == 304
        v = learned.get("/api/state")["project"]["v"]
        assert "immutable" in learned.http.get(f"/{path}/0?v={v}").headers["cache-control"]
        assert "immutable" not in learned.http.get(f"/{path}/0?v=other").headers["cache-control"]


def test_thumbnails_are_packed_and_read_again(photos, open_studio, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    Image.effect_noise((900, 300), 80).convert("RGB").save(data / "wide.png")
    (data / "broken.jpg").write_bytes(b"no image")
    shutil.copy(photos / "red0.jpg", data)
    client = open_studio(data)
    wide = [item["id"] for item in client.get("/api/grid?q=wide")["items"]][0]
    broken = [item["id"] for item in client.get("/api/grid?q=broken")["items"]][0]
    content = client.http.get(f"/thumb/{wide}").content
    with Image.open(io.BytesIO(content)) as image:
        assert image.size == (256, 85)
    assert "cannot be shown" in client.get(f"/thumb/{broken}", status=422)["error"]
    assert broken not in [item["id"] for item in client.get("/api/queue?n=20")["items"]]
    list(client.studio.thumbnails.build(client.studio.stop))
    files = sorted(path.name for path in (client.studio.project.folder / "thumbnails").iterdir())
    assert files == ["data", "images", "index"]
    client = open_studio(data)
    assert (client.studio.thumbnails.start >= 0).sum() == 2
    assert client.http.get(f"/thumb/{wide}").content == content
    with open(client.studio.thumbnails.folder / "data", "r+b") as file:  # a damaged pack is mended, not served
        file.write(b"damage" * 100)
    assert client.http.get(f"/thumb/{wide}").content == content


def test_many_thumbnails_in_one_answer(client, monkeypatch):
    """In the order asked for; empty where there is none yet, or where it would be too much."""

    def ask(images: str) -> list[bytes]:
        return [b64decode(jpeg) for jpeg in client.get(f"/api/thumbnails?images={images}")["jpegs"]]

    made = {i: client.http.get(f"/thumb/{i}").content for i in (7, 3)}
    assert ask("7,5,3") == [made[7], b"", made[3]] and ask("") == []
    monkeypatch.setattr("finessl.studio.thumbnails.LARGEST_ANSWER", len(made[7]) + len(made[3]) - 1)
    assert ask("7,3") == [made[7], b""]


def test_export_of_labels_round_trip(learned, photos):
    learned.label(44, None)
    found = learned.post("/api/export", {"what": "csv"})
    dataset = open_dataset(photos, labels=found["path"])
    assert int(dataset.given.sum()) == 9
    named = {row["path"]: row["label"] for row in csv.DictReader(Path(found["path"]).read_text().splitlines())}
    assert all(named[f"{c}{i}.jpg"] == c for c in ("blue", "green", "red") for i in range(3))
    folders = open_dataset(learned.post("/api/export", {"what": "folders"})["path"])
    assert sorted(folders.classes) == ["blue", "green", "none of these classes", "red"] and len(folders.train) == 10
    other = learned.post("/api/export", {"what": "csv"})["path"]
    assert other != found["path"]  # nothing is overwritten
    formats = {f["format"]: f["ok"] for f in learned.get("/api/export")["formats"]}
    assert not formats["timm"], "frozen features have another head"
    assert formats["csv"] and formats["onnx"] and "finessl quick" in learned.get("/api/export")["commands"]["quick"]


def test_images_are_never_changed(learned, photos):
    assert len(list(photos.iterdir())) == 45 and learned.studio.project.folder not in photos.parents
    assert np.unique([path.suffix for path in photos.iterdir()]).tolist() == [".jpg"]


def test_events_tell_every_tab(learned):
    """State and training at once, then again when something has changed; not otherwise."""
    server = Server(learned.studio, learned.access)

    async def listen() -> list[str]:
        heard, stream = [], server.stream()
        async for event in stream:
            heard.append(event)
            if len(heard) == 2:
                learned.studio.assign([44], 0, "queue")
            if len(heard) == 3:
                server.closing = True
        return heard

    state, training, again = asyncio.run(asyncio.wait_for(listen(), 20))
    assert state.startswith("event: state\n") and training.startswith("event: training\n") and state.endswith("\n\n")
    first, second = (json.loads(event.split("data: ")[1]) for event in (state, again))
    assert second["labels"] == first["labels"] + 1 and second["version"] > first["version"]
