"""A connection to Ray, an optional dependency."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from finessl.errors import FinesslError


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The module ray, connected to the cluster at `address`. "auto": the cluster of this machine; None: a new local one."""
    try:
        import ray
    except ImportError as error:
        raise FinesslError("--engine ray needs Ray: pip install 'finessl[ray]'.") from error
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=None if address else False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise FinesslError(f"no Ray cluster could be reached at {address!r}: {error}") from error
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()
