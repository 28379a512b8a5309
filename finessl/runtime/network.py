"""Addresses and ports of local servers."""

from __future__ import annotations

import ipaddress
import re
import socket

from finessl.errors import FinesslError

HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::[0-9]+)?")  # name or [IPv6 address], port


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def address_of(host: str, listener: socket.socket) -> str:
    """http://HOST:PORT of a bound socket."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def bind_again(host: str, port: int) -> socket.socket:
    """To a port that was used before, or to a free one where another program has it now."""
    try:
        return bind(host, port)
    except FinesslError:
        return bind(host, 0)


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named: asyncio then sends without delay
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)  # a client that is faster than the server's start waits instead of being refused
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise FinesslError(
            f"cannot listen on {host} port {port}: {reason}. Choose another --port or --host."
        ) from error
    return listener
