"""Each of these is an attack, or a mistake that would open the way for one."""

from __future__ import annotations

import socket

import pytest
from starlette.testclient import TestClient

from finessl.studio.security import LARGEST_BODY, Access
from finessl.studio.server import MOST_LABELS, Server

ANY_WRITE = ("/api/undo", {})


@pytest.fixture
def stranger(client):
    """A browser without the cookie."""
    return TestClient(Server(client.studio, client.access).app(), base_url="http://127.0.0.1")


@pytest.mark.parametrize(
    "path",
    [
        "/api/state", "/api/events", "/api/queue", "/thumb/0", "/api/thumbnails?images=0", "/image/0", "/static/app.js",
        "/nothing", "/auth/",
    ],
)  # fmt: skip
def test_without_the_cookie_nothing_is_shown(stranger, path):
    answer = stranger.get(path)
    assert answer.status_code == 401 and "terminal" in answer.json()["error"]
    assert stranger.get("/").status_code == 401


def test_token_becomes_a_strict_http_only_cookie(client, stranger):
    assert len(client.access.token) >= 43  # 256 bits in base64
    assert stranger.get("/auth?token=").status_code == 401
    assert stranger.get(f"/auth?token={client.access.token[:-1]}").status_code == 401
    answer = stranger.get(f"/auth?token={client.access.token}", follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and client.access.token.lower() not in cookie
    assert stranger.get("/api/state").status_code == 200


def test_every_start_has_keys_of_its_own():
    one, other = Access(), Access()
    assert len({one.token, one.cookie, other.token, other.cookie}) == 4


@pytest.mark.parametrize("cookie", ["finessl-studio-0=guess", "finessl-studio-0=", "other=1", "=;=;", "\xff" * 9])
def test_a_wrong_cookie_is_no_cookie(stranger, cookie):
    assert stranger.get("/api/state", headers={"cookie": cookie.encode("latin-1")}).status_code == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "[::1]evil", "localhost.evil.example:80", "", "10.0.0.1", "a b"]
)
def test_dns_rebinding(client, host):
    """A name that the attacker has made mean this machine."""
    assert client.http.get("/api/state", headers={"host": host}).status_code == 403
    assert client.http.get(f"/auth?token={client.access.token}", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8123", "127.0.0.1:1", "[::1]:99", "127.1.2.3"])
def test_local_names(host):
    assert Access().knows_host(host)


def test_open_to_the_network():
    access = Access("0.0.0.0", 8000)
    assert access.knows_host("192.168.1.7:8000") and access.knows_host(socket.gethostname())
    assert not access.knows_host("evil.example") and not access.knows_host("192.168.1.7.evil.example")
    assert Access("my-pc.local").knows_host("my-pc.local:80")


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "http://127.0.0.1.evil.example", "null", "http://127.0.0.1:9", "https://localhost"],
)
def test_other_origins_are_refused(client, origin):
    for answer in (
        client.http.post(ANY_WRITE[0], json={}, headers={"x-finessl": "1", "origin": origin}),
        client.http.get("/api/state", headers={"origin": origin}),
    ):
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_elsewhere_cannot_embed(client, site):
    headers = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
    for path in ("/image/0", "/api/thumbnails?images=0"):
        assert client.http.get(path, headers=headers).status_code == 403
    assert client.http.get("/api/state", headers=headers).status_code == 403


def test_a_write_needs_its_header_and_json(client):
    path, body = ANY_WRITE
    own = {"origin": "http://127.0.0.1", "x-finessl": "1"}
    assert client.http.post(path, json=body, headers=own).status_code == 200
    assert client.http.post(path, json=body, headers={"origin": "http://127.0.0.1"}).status_code == 403
    assert client.http.post(path, data={"a": "b"}, headers=own).status_code == 415  # what a form can send
    assert client.http.post(path, content="{}", headers={**own, "content-type": "text/plain"}).status_code == 415
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert client.http.request(method, "/api/label", headers=own).status_code == 405
    assert client.http.get("/api/label").status_code == 405


def test_large_requests_are_refused(client):
    headers = {"x-finessl": "1", "content-type": "application/json"}
    big = b" " * (LARGEST_BODY + 1)
    assert client.http.post("/api/undo", content=big, headers=headers).status_code == 413

    def pieces():  # without a length
        for _ in range(LARGEST_BODY // (1 << 16) + 2):
            yield b" " * (1 << 16)

    assert client.http.post("/api/undo", content=pieces(), headers=headers).status_code == 413
    wrong = {**headers, "content-length": "-1"}
    assert client.http.post("/api/undo", content=b"{}", headers=wrong).status_code == 413
    assert client.post("/api/labels", {"images": [0] * (MOST_LABELS + 1), "class": None}, status=400)


@pytest.mark.parametrize(
    "path",
    [
        "/image/45", "/image/-1", "/image/..%2f..%2fetc%2fpasswd", "/thumb/0/../../x", "/thumb/99999999999999999999",
        "/static/../server.py", "/static/..%2fserver.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/image/1e3",
    ],
)  # fmt: skip
def test_images_by_number_files_by_name_never_by_path(client, path):
    answer = client.http.get(path)
    assert answer.status_code == 404 and "import" not in answer.text and "root:" not in answer.text


@pytest.mark.parametrize("path", ["/", "/api/state", "/thumb/0", "/static/app.js", "/nothing"])
def test_headers_of_every_answer(client, stranger, path):
    for answer in (client.http.get(path), stranger.get(path)):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert policy.count("data:") == 1 and "img-src 'self' data:;" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in answer.headers


@pytest.mark.parametrize(
    "query",
    [
        "queue?n=21", "queue?n=-1", "queue?n=x", "queue?after=x", "queue?after=" + ",".join(["1"] * 1001),
        "grid?limit=1001", "grid?offset=-5", "grid?offset=99999999999", "grid?min=2", "grid?max=nan", "grid?sort=x",
        "grid?label=x", "grid?class=77", "grid?source=x", "grid?q=" + "a" * 201, "review?kind=x",
        "thumbnails?images=0,45", "thumbnails?images=-1", "thumbnails?images=../x", "thumbnails?images=9999999999",
        "thumbnails?images=" + ",".join(["0"] * 201), "thumbnails?" + "&".join(["images=0"] * 201),
    ],
)  # fmt: skip
def test_limits_of_questions(client, query):
    assert client.get(f"/api/{query}", status=400)["error"].endswith(".")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("label", {}), ("label", {"image": 99, "class": 0}), ("label", {"image": -1, "class": 0}),
        ("label", {"image": True, "class": 0}), ("label", {"image": 0, "class": 99}), ("label", {"image": "0", "class": 0}),
        ("label", {"image": 0, "class": 0, "source": "data"}), ("label", [1]), ("labels", {"images": "all", "class": 0}),
        ("labels", {"images": [], "class": 0}), ("labels", {"images": [[0]], "class": 0}),
        ("classes", {"add": ""}), ("classes", {"add": "a\nb"}), ("classes", {"add": "x" * 101}), ("classes", {"add": 5}),
        ("classes", {"add": "red"}), ("classes", {"add": "\ud800"}), ("classes", {"merge": 0, "into": 0}), ("classes", {}),
        ("classes", {"rename": 0}), ("classes", {"rename": 99, "name": "x"}),
        ("train", {}), ("train", {"action": "start", "budget": "x"}), ("train", {"action": "start", "steps": 10**9}),
        ("train", {"action": "start"}), ("train", {"action": "stop"}), ("train", {"action": "resume"}),
        ("review", {"image": 0}), ("review", {"image": 0, "action": "x"}), ("review", {"image": 0, "action": "change"}),
        ("audit", {"image": 0}), ("audit", {"image": 99, "class": 0}),
        ("export", {}), ("export", {"what": "../x"}), ("export", {"what": ["csv"]}),
        ("export", {"what": "classifier", "format": "../../x"}), ("export", {"what": "folders"}),
    ],
)  # fmt: skip
def test_bad_requests_end_in_a_sentence_and_change_nothing(client, path, body):
    before = client.get("/api/state")["events"]
    assert client.post(f"/api/{path}", body, status=400)["error"].strip().endswith(".")
    assert client.get("/api/state")["events"] == before


def test_json_that_is_none(client):
    headers = {"x-finessl": "1", "content-type": "application/json"}
    for content in (b"{", b"\xff", b"[" * 100_000, b'"a"', b"null"):
        assert client.http.post("/api/label", content=content, headers=headers).status_code == 400
