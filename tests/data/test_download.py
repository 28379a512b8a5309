"""Downloads from a server on this machine: whole, interrupted, damaged, hostile."""

from __future__ import annotations

import hashlib
import http.server
import pickle
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

from finessl.data import download
from finessl.data.download import Archive, fetch, obtain, unpack
from finessl.data.sources import cifar, open_dataset
from finessl.errors import FinesslError

from .conftest import tar_bytes

CONTENT = np.random.default_rng(0).bytes(300_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    """Serves `files`; breaks off after `cut` bytes for the first `cuts` requests; notes the ranges that were asked."""
    monkeypatch.setattr(download, "PAUSE", 0.0)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.headers.get("Range"))
            content = state.files.get(self.path)
            if content is None or state.refuse:
                self.send_error(state.refuse or 404)
                state.refuse = 0 if state.refuse == 503 else state.refuse
                return
            start = int(self.headers["Range"][6:-1]) if state.ranges and "Range" in self.headers else 0
            if start >= len(content) and start:
                self.send_error(416)
                return
            body = content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if state.cuts > 0:
                state.cuts -= 1
                body = body[: state.cut]
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class State:
        files: dict[str, bytes] = {"/file.bin": CONTENT}
        asked: list[str | None] = []
        cuts, cut, ranges, refuse = 0, 100_000, True, 0
        url = ""

    state = State()
    state.files, state.asked = dict(State.files), []
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{listener.server_port}"
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield state
    listener.shutdown()
    listener.server_close()


def test_whole_with_progress_and_only_once(server, tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    for _ in range(2):
        fetch(f"{server.url}/file.bin", tmp_path / "d" / "f", md5=MD5, progress=lambda *step: told.append(step))
    assert (tmp_path / "d" / "f").read_bytes() == CONTENT and server.asked == [None]
    assert told[-1] == (300_000, 300_000) and [f.name for f in (tmp_path / "d").iterdir()] == ["f"]


def test_goes_on_where_the_connection_ended(server, tmp_path: Path) -> None:
    server.cuts = 2
    fetch(f"{server.url}/file.bin", tmp_path / "f", md5=MD5)
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-", "bytes=200000-"]


def test_goes_on_in_another_session(server, tmp_path: Path) -> None:
    server.cuts, server.cut = 99, 30_000
    with pytest.raises(FinesslError, match="What has arrived is kept in .*f.part; run again"):
        fetch(f"{server.url}/file.bin", tmp_path / "f", md5=MD5)
    assert (tmp_path / "f.part").stat().st_size == 150_000 and not (tmp_path / "f").exists()
    server.cuts = 0
    fetch(f"{server.url}/file.bin", tmp_path / "f", md5=MD5)
    assert (tmp_path / "f").read_bytes() == CONTENT and server.asked[-1] == "bytes=150000-"


def test_a_server_without_ranges_sends_all_again(server, tmp_path: Path) -> None:
    server.cuts, server.ranges = 1, False
    fetch(f"{server.url}/file.bin", tmp_path / "f", md5=MD5)
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_complete_but_killed_before_the_rename(server, tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(CONTENT)
    fetch(f"{server.url}/file.bin", tmp_path / "f", md5=MD5)
    assert (tmp_path / "f").read_bytes() == CONTENT and server.asked == ["bytes=300000-"]


def test_a_busy_server_is_asked_again(server, tmp_path: Path) -> None:
    server.refuse = 503
    fetch(f"{server.url}/file.bin", tmp_path / "f", md5=MD5)
    assert len(server.asked) == 2


def test_damage_and_absence(server, tmp_path: Path) -> None:
    with pytest.raises(FinesslError, match=f"its MD5 is {MD5} and should be 00"):
        fetch(f"{server.url}/file.bin", tmp_path / "f", md5="00")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FinesslError, match="404"):
        fetch(f"{server.url}/none", tmp_path / "f", md5=MD5)
    assert server.asked[1:] == [None]  # no use in asking again
    (tmp_path / "file").touch()
    with pytest.raises(FinesslError, match="cannot write"):
        fetch(f"{server.url}/file.bin", tmp_path / "file" / "f", md5=MD5)


def test_members_are_never_written_outside(tmp_path: Path) -> None:
    for number, name in enumerate(("../evil", "/tmp/finessl-evil", "folder/../../evil")):
        (tmp_path / "a.tar.gz").write_bytes(tar_bytes({"folder/fine": b"1", name: b"2"}))
        root = tmp_path / "inner" / str(number)
        root.mkdir(parents=True, exist_ok=True)
        if name.startswith("/"):  # an absolute path is made relative
            unpack(tmp_path / "a.tar.gz", root, "folder")
            assert not Path(name).exists() and not (root / name[1:]).exists()
        else:
            with pytest.raises(FinesslError, match="would write outside"):
                unpack(tmp_path / "a.tar.gz", root, "folder")
            assert list(root.iterdir()) == []
        assert not list(tmp_path.rglob("evil"))


def test_links_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", mode="w:gz") as archive:
        link = tarfile.TarInfo("folder/link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        archive.addfile(link)
    with pytest.raises(FinesslError, match="holds a link"):
        unpack(tmp_path / "a.tar.gz", tmp_path, "folder")
    assert [f.name for f in tmp_path.iterdir()] == ["a.tar.gz"]


def test_archives_cut_short_or_of_something_else(tmp_path: Path) -> None:
    whole = tar_bytes({"folder/a": b"1" * 100_000})
    for content, message in (
        (whole[:-50], "cannot be unpacked"),
        (tar_bytes({"x/a": b""}), "holds no folder"),
        (b"", "cannot be"),
    ):
        (tmp_path / "a.tar.gz").write_bytes(content)
        with pytest.raises(FinesslError, match=message):
            unpack(tmp_path / "a.tar.gz", tmp_path, "folder")
        assert [f.name for f in tmp_path.iterdir()] == ["a.tar.gz"]


def test_cifar100_is_downloaded_when_asked(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.zeros((4, 3072), np.uint8)
    part = pickle.dumps({"data": rows, "fine_labels": [0, 1, 0, 1]})
    meta = pickle.dumps({"fine_label_names": ["a", "b"]})
    archive = tar_bytes(
        {f"cifar-100-python/{name}": data for name, data in (("train", part), ("test", part), ("meta", meta))}
    )
    server.files["/cifar-100-python.tar.gz"] = archive
    local = Archive(f"{server.url}/cifar-100-python.tar.gz", hashlib.md5(archive).hexdigest(), "cifar-100-python")
    monkeypatch.setattr(cifar, "ARCHIVES", {"cifar100": local})
    with pytest.raises(FinesslError, match="download"):
        open_dataset("cifar100", root=tmp_path)
    assert server.asked == []
    data = open_dataset("cifar100", root=tmp_path, download=True)
    assert data.classes == ["a", "b"] and len(data.train) == 4
    assert [f.name for f in tmp_path.iterdir()] == ["cifar-100-python"]
    open_dataset("cifar100", root=tmp_path, download=True)
    assert len(server.asked) == 1
    assert obtain(local, tmp_path) == tmp_path / "cifar-100-python"
