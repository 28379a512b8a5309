"""`finessl predict RUN INPUTS… --out DIR`: predictions for any number of images, in parts.

DIR/predictions.json        what is predicted, with which classifier; at the end, the totals
DIR/part-00000.parquet …    path, label, confidence, …, error (why an image could not be read)

A part is a piece of a tar shard, a row group of a Parquet file with images, or some thousand files. It is computed by one
process with one thread, so that its content does not depend on the number of processes, and its file appears when it
is complete: the same command again computes the parts that are missing or damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout

from finessl.data.dataset import count_of, some
from finessl.data.folder_index import natural
from finessl.data.images import FileImages, ImageError, Images, decode
from finessl.data.path_table import PathTable
from finessl.data.shards import ShardImages, read_shard
from finessl.errors import FinesslError
from finessl.inference.classifier import Classifier, load, usual_precision
from finessl.inference.evaluate import predict_images
from finessl.inference.predict import encoded, find_files
from finessl.runtime.device import resolve_device
from finessl.runtime.files import read_json, replacing, sha256, write_json, writing
from finessl.runtime.machine import usable_cores
from finessl.runtime.precision import resolve_precision

PART_FILES = 4096  # images of a part made of files
PART_BYTES = 256 << 20  # of a tar file; a larger one is cut into pieces
AGAIN = "the parts that are written are kept."
MANIFEST = "predictions.json"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Part:
    """Images that one process predicts at once."""

    kind: str  # tar, parquet, files, unread
    source: str  # the file, or where the files were found
    piece: int = 0  # of `pieces` equal ones of a tar file; the row group of a Parquet file
    pieces: int = 1
    items: tuple[tuple[str, str], ...] = ()  # files: (path, ""); unread: (path, reason)


@dataclass(frozen=True)
class Settings:
    """What decides the content of a part, besides its images."""

    run: str
    weights: str | None
    device: str
    precision: str
    top: int
    min_confidence: float | None
    folder: str  # relative paths are meant from here
    threads: int  # for decoding


@dataclass(frozen=True)
class Totals:
    images: int
    broken: int
    parts: int
    examples: list[tuple[str, str]]  # (path, reason) of some broken images


def predict_bulk(
    run: str | Path,
    inputs: Sequence[Path],
    out: Path,
    *,
    top: int = 1,
    min_confidence: float | None = None,
    weights: str | None = None,
    device: str = "auto",
    jobs: int | None = None,
    engine: str = "local",
    address: str | None = None,
    progress: Progress | None = None,
) -> Totals:
    """Predict all images of `inputs` (tar shards, folders, tables and lists of files, Parquet files with images).

    jobs: processes; by default one per core, or per GPU.   engine: local, or ray for many machines (`address` as in
    `finessl compare`), where the run, the inputs and `out` must have the same paths.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise FinesslError("predictions in parts are Parquet files: pip install 'finessl[tables]'.") from error
    if engine not in ("local", "ray"):
        raise FinesslError(f"--engine {engine}: choose local or ray.")
    target = resolve_device(device)
    classifier = load(run, weights=weights, device="cpu")  # refuses a run that is not finished, before any work
    jobs = jobs or (torch.cuda.device_count() if target.type == "cuda" else usable_cores())
    settings = Settings(
        str(Path(run).absolute()),
        weights and str(Path(weights).absolute()),
        target.type,
        resolve_precision(usual_precision(classifier.description, target), target),
        min(top, len(classifier.classes)),
        min_confidence,
        os.getcwd(),
        max(usable_cores() // jobs, 1),
    )
    parts = cut(inputs)
    with writing(out, AGAIN), alone(out):
        open_folder(out, settings, parts, classifier)
        waiting = [number for number in range(len(parts)) if read_part(part_file(out, number)) is None]
        done = len(parts) - len(waiting)
        if progress:
            progress(done, len(parts))
        failed: dict[int, str] = {}
        carry_out = run_local if engine == "local" else ray_runner(address)
        for number, failure in carry_out(
            settings, [(n, parts[n], str(part_file(out, n).absolute())) for n in waiting], jobs
        ):
            done += 1
            if failure:
                failed[number] = failure
            if progress:
                progress(done, len(parts))
        if failed:
            shown = some([f"{parts[n].source} ({reason})" for n, reason in sorted(failed.items())], 3)
            raise FinesslError(
                f"{len(failed)} of {count_of(len(parts), 'part')} failed: {shown}. The others are in {out}; the same "
                "command again tries these once more."
            )
        return finish(out, len(parts))


# ---- what there is to do --------------------------------------------------------------------------------------------


def cut(inputs: Sequence[Path]) -> list[Part]:
    """The inputs as parts, in their order. Sizes are fixed, so that the same inputs give the same parts."""
    parts: list[Part] = []
    for path in inputs:
        shards = shards_of(path)
        if shards:
            for shard in shards:
                pieces = max(math.ceil(shard.stat().st_size / PART_BYTES), 1)
                parts += [Part("tar", str(shard), piece, pieces) for piece in range(pieces)]
        elif groups := image_groups(path):
            parts += [Part("parquet", str(path), group, groups) for group in range(groups)]
        else:
            files, unread = find_files([path])
            for start in range(0, len(files), PART_FILES):
                chunk = tuple((str(file), "") for file in files[start : start + PART_FILES])
                parts.append(Part("files", str(path), items=chunk))
            if unread:
                parts.append(Part("unread", str(path), items=tuple(unread)))
    return parts


def shards_of(path: Path) -> list[Path]:
    """The tar file itself, or the tar files of a folder."""
    if path.is_dir():
        return sorted(path.glob("*.tar"), key=lambda file: natural(file.name))
    return [path] if path.suffix.lower() == ".tar" and path.is_file() else []


def image_groups(path: Path) -> int:
    """Row groups of a Parquet file that holds images in a column `image`; 0 for anything else."""
    if path.suffix.lower() not in (".parquet", ".pq") or not path.is_file():
        return 0
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            return file.num_row_groups if "image" in file.schema_arrow.names else 0
    except (OSError, ArrowException) as error:
        raise FinesslError(f"{path} cannot be read as a Parquet file: {error}") from error


def open_folder(out: Path, settings: Settings, parts: list[Part], classifier: Classifier) -> None:
    """Make the folder for these predictions, or check that it holds the same ones."""
    digest = hashlib.sha256(json.dumps([asdict(part) for part in parts]).encode()).hexdigest()
    folder = Path(settings.run)
    folder = folder if (folder / "classifier.json").exists() else folder / "classifier"
    about = {
        "classifier": sha256(folder / "classifier.json"),
        "inputs": digest,
        "device": settings.device,
        "precision": settings.precision,
        "top": settings.top,
        "min_confidence": settings.min_confidence,
    }
    manifest = out / MANIFEST
    if manifest.exists():
        there = read_json(manifest, dict[str, Any])
        if changed := [name for name, value in about.items() if there.get(name) != value]:
            raise FinesslError(
                f"{out} holds predictions with other settings ({', '.join(changed)}); choose another --out, or remove it."
            )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FinesslError(f"{out} exists already and holds no predictions; choose another --out.")
    out.mkdir(parents=True, exist_ok=True)
    write_json(manifest, {**about, "classes": classifier.classes, "parts": len(parts)})


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Only one command at a time writes to a folder."""
    out.parent.mkdir(parents=True, exist_ok=True)
    place = out.absolute()
    if not place.name:
        raise FinesslError(f"cannot write to {out}: name a new folder for --out.")
    lock = FileLock(place.with_name(f".{place.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise FinesslError(
            f"another command is writing to {out}; wait for its end, or choose another --out."
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(lock.lock_file)
        lock.release()


def part_file(out: Path, number: int) -> Path:
    return out / f"part-{number:05d}.parquet"


def read_part(path: Path) -> tuple[int, int, list[tuple[str, str]]] | None:
    """Images that were predicted and that were not, and (path, reason) of some of these. None if the part is missing or
    damaged."""
    from pyarrow import ArrowException, compute, parquet

    if not path.is_file():  # nor a pipe, which would never end
        return None
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        broken = table["confidence"].null_count
        images = len(table) - broken
        if json.loads(table.schema.metadata[b"finessl"]) != {"images": images, "broken": broken}:
            return None
        rows = table.filter(compute.is_null(table["confidence"])).slice(0, 5).to_pylist() if broken else []
        return images, broken, [(row["path"], row["error"]) for row in rows]
    except (OSError, ArrowException, ValueError, KeyError, TypeError, RecursionError):
        return None


def finish(out: Path, parts: int) -> Totals:
    """The totals of all parts, added to predictions.json."""
    images = broken = 0
    examples: list[tuple[str, str]] = []
    for number in range(parts):
        found = read_part(part_file(out, number))
        if found is None:
            raise FinesslError(f"{part_file(out, number)} is damaged; the same command again computes it once more.")
        images, broken = images + found[0], broken + found[1]
        examples += found[2][: 5 - len(examples)]
    if not images:
        reasons = "; ".join(f"{path} ({reason})" for path, reason in examples[:3])
        raise FinesslError(f"nothing was predicted: no image could be read. {reasons}")
    manifest = read_json(out / MANIFEST, dict[str, Any])
    write_json(out / MANIFEST, {**manifest, "finished": {"images": images, "broken": broken}})
    return Totals(images, broken, parts, examples)


# ---- in a worker ----------------------------------------------------------------------------------------------------

_worker: tuple[Classifier, Settings] | None = None


def start_worker(settings: Settings, number: int = 0) -> None:
    """Load the classifier once. Every worker computes with one thread: its results do not depend on their number."""
    global _worker
    os.chdir(settings.folder)
    device = settings.device
    if device == "cuda" and torch.cuda.device_count() > 1:
        device = f"cuda:{number % torch.cuda.device_count()}"
    if device == "cpu":
        torch.set_num_threads(1)
    _worker = load(settings.run, weights=settings.weights, device=device, precision=settings.precision), settings


def run_part(part: Part, target: str) -> str | None:
    """Write the part's file; why that failed, if it did."""
    assert _worker is not None
    try:
        write_part(*_worker, part, Path(target))
    except FinesslError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    return None


def write_part(classifier: Classifier, settings: Settings, part: Part, target: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    images, broken = open_part(part)
    count = len(images)
    keys = [images.key(i) for i in range(count)]
    labels = np.full((count, settings.top), -1, np.int32)
    confidences = np.zeros((count, settings.top))
    errors: list[str | None] = [None] * count
    for positions, probabilities, failures in predict_images(classifier, images, threads=settings.threads):
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, : settings.top]
        labels[positions] = best
        confidences[positions] = np.take_along_axis(probabilities, best, 1).astype(np.float64).round(6)
        for position, reason in failures:
            errors[position] = reason
    read = labels[:, 0] >= 0
    names = np.array([*classifier.classes, None], object)  # −1: none
    sure = read & (confidences[:, 0] >= (settings.min_confidence or 0))
    more, nothing = len(broken), [None] * len(broken)
    columns: dict[str, Any] = {"path": [*keys, *(path for path, _ in broken)]}
    for rank in range(settings.top):
        suffix = "" if rank == 0 else str(rank + 1)
        shown = np.where(sure, labels[:, 0], -1) if rank == 0 else labels[:, rank]
        columns[f"label{suffix}"] = [*names[shown], *nothing]
        columns[f"confidence{suffix}"] = pyarrow.array(
            np.append(confidences[:, rank], np.zeros(more)), mask=np.append(~read, np.ones(more, bool))
        )
    if settings.min_confidence is not None:
        columns["guess"] = [*names[labels[:, 0]], *nothing]
    columns["error"] = [*errors, *(reason for _, reason in broken)]
    kinds = {name: pyarrow.float64() if name.startswith("confidence") else pyarrow.string() for name in columns}
    columns = {
        name: values if kinds[name] == pyarrow.float64() else [v if v is None else encoded(v).decode() for v in values]
        for name, values in columns.items()
    }
    about = {"images": int(read.sum()), "broken": int((~read).sum()) + more}
    schema = pyarrow.schema(list(kinds.items()), metadata={"finessl": json.dumps(about)})
    with replacing(target) as partial:
        parquet.write_table(pyarrow.table(columns, schema=schema), partial, write_page_checksum=True)


def open_part(part: Part) -> tuple[Images, list[tuple[str, str]]]:
    """Its images, and (path, reason) of those in formats that are not read."""
    if part.kind == "files":
        paths = [Path(path).as_posix() for path, _ in part.items]
        return FileImages(Path(), PathTable.of(paths, [0] * len(paths))), []
    if part.kind == "unread":
        return FileImages(Path(), PathTable.of([], [])), list(part.items)
    if part.kind == "parquet":
        return row_group(Path(part.source), part.piece), []
    path = Path(part.source)
    shard = read_shard(path)
    bounds = [len(shard.names) * k // part.pieces for k in (part.piece, part.piece + 1)]
    chosen = slice(*bounds)
    names = [f"{part.source}/{name}" for name in shard.names[chosen]]
    unread = [(f"{part.source}/{name}", "not read in this format") for name in shard.unread] if part.piece == 0 else []
    table = PathTable.of(names, shard.sizes[chosen])
    which = np.zeros(len(names), np.int32)
    return ShardImages(path.parent, [path.name], which, np.array(shard.starts[chosen], np.int64), table), unread


class BytesImages:
    """Encoded images in memory: those of a Parquet file's row group."""

    def __init__(self, names: list[str], contents: list[bytes | None]) -> None:
        self.names, self.contents = names, contents

    def __len__(self) -> int:
        return len(self.names)

    def key(self, i: int) -> str:
        return self.names[i]

    def read(self, i: int, *, shorter: int | None = None, square: int | None = None) -> np.ndarray:
        content = self.contents[i]
        if not content:
            raise ImageError("the row holds no image")
        return decode(content, shorter=shorter, square=square)


def row_group(path: Path, group: int) -> Any:
    """Images of a column `image`: bytes, or as Hugging Face stores them a struct with `bytes`."""
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            first = sum(file.metadata.row_group(k).num_rows for k in range(group))
            values = file.read_row_group(group, columns=["image"])["image"].to_pylist()
    except (OSError, ArrowException) as error:
        raise FinesslError(f"{path} cannot be read as a Parquet file: {error}") from error
    contents = [value.get("bytes") if isinstance(value, dict) else value for value in values]
    if odd := {type(value).__name__ for value in contents if value is not None and not isinstance(value, bytes)}:
        raise FinesslError(f"{path}: the column image should hold the bytes of image files, not {min(odd)}.")
    return BytesImages([f"{path}/{first + i}" for i in range(len(contents))], contents)


# ---- many workers ---------------------------------------------------------------------------------------------------

Task = tuple[int, Part, str]  # number, what, to which file


def run_local(settings: Settings, tasks: list[Task], jobs: int) -> Iterator[tuple[int, str | None]]:
    """(number, failure) as parts end, from processes of this machine."""
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        yield from run_here(settings, tasks)
        return
    context = multiprocessing.get_context("spawn")
    counter = context.Value("i", 0)
    pool = ProcessPoolExecutor(jobs, context, _start_process, (settings, counter))
    left, running = iter(tasks), dict[Future[str | None], int]()

    def submit(some_tasks: Iterable[Task]) -> None:
        for number, part, target in some_tasks:
            running[pool.submit(run_part, part, target)] = number

    try:
        submit(itertools.islice(left, 2 * jobs))  # file lists travel when they are needed
        while running:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield running.pop(future), future.result()
            submit(itertools.islice(left, len(ended)))
    except BrokenProcessPool as error:
        raise FinesslError(
            "a worker process ended unexpectedly (out of memory?). Run the same command again, with fewer --jobs: "
            f"{AGAIN}"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_here(settings: Settings, tasks: list[Task]) -> Iterator[tuple[int, str | None]]:
    threads, folder = torch.get_num_threads(), os.getcwd()
    try:
        if tasks:
            start_worker(settings)
        for number, part, target in tasks:
            yield number, run_part(part, target)
    finally:
        torch.set_num_threads(threads)
        os.chdir(folder)


def _start_process(settings: Settings, counter: Any) -> None:
    with counter.get_lock():
        number, counter.value = counter.value, counter.value + 1
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(OSError, AttributeError):
        os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which lets the parts end
    start_worker(settings, number)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def ray_runner(address: str | None) -> Callable[[Settings, list[Task], int], Iterator[tuple[int, str | None]]]:
    def run_ray(settings: Settings, tasks: list[Task], jobs: int) -> Iterator[tuple[int, str | None]]:
        from finessl.runtime.ray import connected

        with connected(address) as ray:
            have = ray.cluster_resources()
            share = 1.0 if settings.device == "cuda" else 0.0
            slots = int(have.get("GPU", 0) if share else have.get("CPU", 1))
            workers = max(min(slots, len(tasks)), 1)
            worker = ray.remote(RayWorker).options(num_cpus=1, num_gpus=share, max_restarts=3, max_task_retries=3)
            actors = [worker.remote(replace(settings, threads=1)) for _ in range(workers)]
            left, running = iter(tasks), {}

            def submit(actor: Any) -> None:
                for number, part, target in left:
                    running[actor.run.remote(part, target)] = (number, actor)
                    return

            for actor in actors:
                submit(actor)
            while running:
                (reference, *_), _ = ray.wait(list(running), num_returns=1)
                number, actor = running.pop(reference)
                try:
                    yield number, ray.get(reference)
                except ray.exceptions.RayError as lost:
                    yield number, f"its worker was lost: {str(lost).splitlines()[0]}"
                submit(actor)

    return run_ray


class RayWorker:
    def __init__(self, settings: Settings) -> None:
        start_worker(settings)

    def run(self, part: Part, target: str) -> str | None:
        return run_part(part, target)
