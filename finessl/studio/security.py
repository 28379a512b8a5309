"""Who may talk to the studio. Every request passes here before anything else looks at it.

A page elsewhere on the web can send requests to a local server, and can make its own name mean this machine (DNS
rebinding). So the name asked for must be a local one, other origins are refused, and a cookie is needed that only the
address which `finessl studio` prints can set. Writes need a header that a foreign page cannot send without asking first.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finessl.runtime.network import HOST, is_loopback

LARGEST_BODY = 2 << 20  # bytes
SAFE_METHODS = ("GET", "HEAD")
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
ASK = "Open the address that finessl studio has printed in the terminal: it holds the key to this page."


@dataclass(frozen=True)
class Access:
    """host: what the server listens on.   token: exchanged once for a cookie; new at every start."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))  # 256 bits
    cookie: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    @property
    def cookie_name(self) -> str:
        return f"finessl-studio-{self.port}"  # cookies do not know ports: two studios share them

    def knows_host(self, header: str) -> bool:
        """Local names, and where the server is open to the network also addresses and this machine's own names.

        A rebinding attack needs a name that the attacker owns; an address cannot be rebound."""
        found = HOST.fullmatch(header)
        if not found:
            return False
        name = found[1].strip("[]").lower()
        if is_loopback(name):
            return True
        if is_loopback(self.host):
            return False
        if name in (self.host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class Guard:
    """ASGI middleware: host, origin, cookie, size of the body; security headers on every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        answer = self.refusal(scope)
        if answer is not None:
            await answer(scope, receive, secured)
            return
        await self.app(scope, limited(receive), secured)

    def refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that goes no further; also the exchange of the token."""
        headers, method = Headers(scope=scope), scope["method"]
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.access.knows_host(hosts[0]):
            return refuse(403, "this studio does not answer to that host name.")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != hosts[0].lower():
            return refuse(403, "requests from other sites are refused.")
        if scope["path"] == "/auth" and method == "GET":
            return self.exchange(scope)
        navigation = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
        if not navigation and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return refuse(403, "requests from other sites are refused.")
        if not self.admitted(headers):
            if scope["path"] == "/":
                return PlainTextResponse(f"{ASK}\n", 401)
            return refuse(401, ASK)
        if method not in SAFE_METHODS:
            if method != "POST":
                return refuse(405, "only GET and POST are answered.")
            if headers.get("x-finessl") != "1":
                return refuse(403, "a write needs the header X-Finessl: 1.")
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return refuse(415, "a write needs Content-Type: application/json.")
            length = headers.get("content-length", "0")
            if not length.isdecimal() or int(length[:20]) > LARGEST_BODY:
                return refuse(413, f"a request may have {LARGEST_BODY:,} bytes.")
        return None

    def exchange(self, scope: Scope) -> Response:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        given = query.get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), self.access.token.encode()):
            return PlainTextResponse(f"This key is of another studio, or cut. {ASK}\n", 401)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(self.access.cookie_name, self.access.cookie, httponly=True, samesite="strict", path="/")
        return answer

    def admitted(self, headers: Headers) -> bool:
        given = [cookie_parser(line).get(self.access.cookie_name, "") for line in headers.getlist("cookie")]
        return any(hmac.compare_digest(value.encode(), self.access.cookie.encode()) for value in given)


class TooLarge(Exception):
    """The body is longer than its header said."""


def limited(receive: Receive) -> Receive:
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message: Any = await receive()
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            if seen > LARGEST_BODY:
                raise TooLarge
        return message

    return counted


def refuse(status: int, sentence: str) -> JSONResponse:
    return JSONResponse({"error": sentence}, status)
