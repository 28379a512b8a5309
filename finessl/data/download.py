"""Downloads: resumed after an interruption, verified by checksum, unpacked safely."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from finessl.errors import FinesslError
from finessl.runtime.callbacks import Count, no_count

CHUNK = 1 << 20  # bytes
ATTEMPTS, PAUSE = 5, 2.0  # seconds before the second attempt; doubled for each further one


@dataclass(frozen=True)
class Archive:
    url: str
    md5: str  # as published; it finds damage, not malice: readers trust no file
    creates: str  # the folder that it unpacks to


def obtain(archive: Archive, root: Path, progress: Count = no_count) -> Path:
    """The archive's folder in `root`, downloaded and unpacked if it is missing."""
    target = root / archive.creates
    if not target.is_dir():
        file = root / archive.url.rpartition("/")[2]
        fetch(archive.url, file, md5=archive.md5, progress=progress)
        unpack(file, root, archive.creates)
        file.unlink()
    return target


def fetch(url: str, target: Path, *, md5: str, progress: Count = no_count) -> None:
    """Download `url` to `target`, which appears only when it is complete and has the right checksum."""
    if target.is_file() and checksum(target) == md5:
        return
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(ATTEMPTS):
            try:
                receive(url, part, progress)
                break
            except (urllib.error.HTTPError, PermissionError) as error:
                raise FinesslError(f"cannot download {url}: {error}.") from error
            except (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError, Interrupted) as error:
                if attempt == ATTEMPTS - 1:
                    raise FinesslError(
                        f"cannot download {url}: {error}. What has arrived is kept in {part}; run again to go on, "
                        f"or put the file at {target} yourself."
                    ) from error
                time.sleep(PAUSE * 2**attempt)
    except OSError as error:
        raise FinesslError(f"cannot write {part}: {error.strerror or error}.") from error
    if (found := checksum(part)) != md5:
        part.unlink()
        raise FinesslError(f"{url} is damaged: its MD5 is {found} and should be {md5}. It was removed; run again.")
    os.replace(part, target)


class Interrupted(Exception):
    """The connection ended before the file did."""


def receive(url: str, part: Path, progress: Count) -> None:
    """Append the missing bytes of the file to `part`."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(
        url, headers={"User-Agent": "finessl", **({"Range": f"bytes={have}-"} if have else {})}
    )
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # no bytes after those in `part`: it is complete, or of another file
            return
        if error.code >= 500 or error.code == 429:
            raise Interrupted(f"the server answers {error.code}") from error
        raise
    with response, open(part, "ab" if response.status == 206 else "wb") as file:
        done = have if response.status == 206 else 0  # a server without ranges sends the whole file again
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        while data := response.read(CHUNK):
            file.write(data)
            done += len(data)
            progress(done, total or 0)
    if total is not None and done < total:
        raise Interrupted(f"the connection ended after {done:,} of {total:,} bytes")


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def unpack(archive: Path, root: Path, creates: str) -> None:
    """Unpack a tar file to root/`creates`. A temporary folder is renamed at the end: the folder is whole or absent."""
    draft = root / f".{creates}.part"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                write_member(archive, tar, member, draft)
        if not (draft / creates).is_dir():
            raise FinesslError(f"{archive} holds no folder {creates}; it is another archive.")
        os.replace(draft / creates, root / creates)
    except (tarfile.TarError, EOFError) as error:
        raise FinesslError(f"{archive} cannot be unpacked ({error}); remove it and run again.") from error
    except OSError as error:
        raise FinesslError(f"cannot unpack {archive} to {root}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_member(archive: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write a file or folder of the archive. Links and devices are refused: they could lead outside the folder.

    tarfile's filter="data" does the same, but is missing in Python before 3.11.4 (Debian 12 has 3.11.2).
    """
    target = (folder / member.name.lstrip("/")).resolve()
    if not target.is_relative_to(folder.resolve()):
        raise FinesslError(f"{archive} would write outside its folder ({member.name}); refused.")
    if not (member.isfile() or member.isdir()):
        raise FinesslError(f"{archive} holds a link or a device ({member.name}); refused.")
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None
    with content, open(target, "wb") as file:
        shutil.copyfileobj(content, file)
