"""metrics.jsonl: appended during training, truncated to the checkpoint's length on resume."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from finessl.errors import FinesslError
from finessl.runs.directory import MAX_METRICS_BYTES, RESUMES
from finessl.runtime.files import read_bytes, writing


class MetricsLog:
    """Appends lines to metrics.jsonl.

    path: the file.   size: bytes that belong to the checkpoint that the run resumes from; later lines are cut off.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        with writing(path, RESUMES):
            kept = path.read_bytes()[:size] if size else b""
            self.digest = hashlib.sha256(kept)
            self.file = open(path, "ab")  # noqa: SIM115 - open for the whole run
            self.file.truncate(size)

    def write(self, row: dict[str, Any]) -> None:
        line = (json.dumps(row, allow_nan=True) + "\n").encode()
        self.digest.update(line)
        with writing(self.path, RESUMES):
            self.file.write(line)

    def sync(self) -> dict[str, Any]:
        """Synchronise the file to disk. Returns its size and digest, for the checkpoint."""
        with writing(self.path, RESUMES):
            self.file.flush()
            os.fsync(self.file.fileno())
            return {"metrics_size": self.file.tell(), "metrics_sha256": self.digest.hexdigest()}

    def close(self) -> None:
        with writing(self.path, RESUMES):
            self.file.close()


def holds_metrics(path: Path, state: dict[str, Any]) -> bool:
    """Whether the file begins with the lines that it had at this checkpoint. (Older checkpoints hold its size only.)"""
    try:
        content = read_bytes(path, MAX_METRICS_BYTES)[: state["metrics_size"]] if state["metrics_size"] else b""
    except FinesslError:
        return False
    wanted = state.get("metrics_sha256")
    return len(content) == state["metrics_size"] and wanted in (None, hashlib.sha256(content).hexdigest())
