"""finessl doctor: what this machine has, what is missing, and how to get it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

from finessl.cli import app

REQUIRED = ("torch", "torchvision", "timm", "safetensors", "numpy", "pillow", "matplotlib", "typer", "rich")
EXTRAS = {
    "open_clip_torch": ("text", "text towers: --head-init text, --head coop"),
    "pyarrow": ("tables", "Parquet tables"),
    "pillow-heif": ("heic", "HEIC photos"),
    "datasets": ("huggingface", "Hugging Face data sets"),
    "onnxruntime": ("export", "finessl export --format onnx"),
    "starlette": ("serve", "finessl serve"),
    "ray": ("ray", "finessl compare on many machines"),
}


@dataclass(frozen=True)
class Finding:
    state: Literal["ok", "none", "problem"]  # none: optional, and not there
    what: str
    finding: str


@app.command()
def doctor() -> None:
    """Show versions, device and memory, and what is not installed."""
    from rich.table import Table
    from rich.text import Text

    from finessl.runtime.terminal import console

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    colours = {"ok": "green", "none": "yellow", "problem": "red"}
    found = examine()
    for line in found:
        table.add_row(Text(line.state, style=colours[line.state]), line.what, line.finding)
    console().print(table)
    if any(line.state == "problem" for line in found):
        raise typer.Exit(1)


def examine() -> list[Finding]:
    from finessl.runtime.version import __version__

    findings = [Finding("ok", "finessl", f"{__version__} on Python {platform.python_version()}")]
    for name in (*REQUIRED, *EXTRAS):
        if version := version_of(name):
            findings.append(Finding("ok", name, version))
        elif name in EXTRAS:
            extra, use = EXTRAS[name]
            findings.append(Finding("none", name, f"optional, for {use}: pip install 'finessl[{extra}]'"))
        else:
            findings.append(Finding("problem", name, f"not installed: pip install {name}"))
    return findings + machine() + files()


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> list[Finding]:
    import torch

    from finessl.data.dataset import count_of
    from finessl.runtime.machine import usable_cores
    from finessl.runtime.precision import supports_bf16

    findings = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            name = torch.cuda.get_device_name(number)
            findings.append(
                Finding("ok", f"cuda:{number}", f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free")
            )
    else:
        findings.append(Finding("none", "GPU", "optional; small backbones and short runs work on the CPU"))
    bf16 = "yes" if supports_bf16(torch.device("cpu")) else "no"
    cores, threads = count_of(usable_cores(), "core"), count_of(torch.get_num_threads(), "thread")
    findings.append(Finding("ok", "CPU", f"{cores}, {threads}, bf16 {bf16}"))
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        page, gib = os.sysconf("SC_PAGE_SIZE"), 2**30
        available, whole = os.sysconf("SC_AVPHYS_PAGES") * page / gib, os.sysconf("SC_PHYS_PAGES") * page / gib
        findings.append(Finding("ok", "memory", f"{available:.0f} of {whole:.0f} GiB free"))
    disk = shutil.disk_usage(Path.cwd())
    state: Literal["ok", "problem"] = "ok" if disk.free > 2**30 else "problem"
    findings.append(Finding(state, "disk", f"{disk.free / 2**30:.0f} GiB free here"))
    return findings


def files() -> list[Finding]:
    findings = []
    assets = Path(__file__).parents[1] / "assets"
    for name, file in (("embedded backbone", "embedded.safetensors"), ("sample images", "sample/train")):
        if (assets / file).exists():
            findings.append(Finding("ok", name, "inside the package"))
        else:
            findings.append(Finding("problem", name, f"{assets / file} is absent: reinstall finessl"))
    try:
        from huggingface_hub.constants import HF_HUB_CACHE

        cache = Path(HF_HUB_CACHE)
        cached = sorted(p.name.removeprefix("models--").replace("--", "/") for p in cache.glob("models--*"))
        empty = Finding("none", "hub cache", f"{cache} is empty: weights are downloaded when needed, or --weights FILE")
        findings.append(Finding("ok", "hub cache", f"{cache}: {', '.join(cached)}") if cached else empty)
    except ImportError:
        pass
    return findings
