"""The parts of `finessl bench studio`; the studio in a process of its own is what test_process.py talks to."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finessl.bench import browser
from finessl.bench.labeling import bench_labeling
from finessl.bench.running import MemoryWatch, Running
from finessl.bench.scale import write_originals, write_set
from finessl.bench.studio import bench_studio, copy_thumbnails, spread, thumbnail_rate, time_refit
from finessl.cli import app
from finessl.data.sources.folder import open_pile
from finessl.errors import FinesslError
from finessl.studio.thumbnails import THUMBNAIL, Thumbnails, preview

CHILD = """import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "x = bytearray(10 ** 8); print(); input()"], stdin=0)
input()"""


def test_refit_is_fast_where_labels_are_propagated_and_where_not(monkeypatch):
    assert time_refit(300, repeats=1)["solver"] == "propagation"
    for module in ("features", "solve"):
        monkeypatch.setattr(f"finessl.studio.{module}.LINKED", 200)
    monkeypatch.setattr("finessl.bench.studio.LINKED", 200)
    found = time_refit(300, repeats=1)
    assert found["solver"] == "ridge" and found["seconds"] > 0


def test_thumbnails_and_spread(tmp_path):
    write_originals(tmp_path / "originals", 10)
    rates = thumbnail_rate(tmp_path / "originals", tmp_path / "state")
    assert rates["per_second"] > 0 and rates["decoded_per_second_and_core"] > 0
    assert spread([0.001, 0.002, 0.003])["p50_ms"] == pytest.approx(2)


def test_thumbnails_of_links_are_copied(tmp_path):
    write_set(tmp_path / "photos", write_originals(tmp_path / "originals", 10), 25)
    thumbnail_rate(tmp_path / "originals", tmp_path / "made")
    copy_thumbnails(tmp_path / "made", tmp_path / "originals", tmp_path / "state", tmp_path / "photos")
    pack = Thumbnails(tmp_path / "state", open_pile(tmp_path / "photos")[0])
    assert not len(pack.missing())
    assert all(pack.get(i) == preview(pack.images, i, THUMBNAIL) for i in range(25))
    pack.close()


def test_the_folder_is_made(tmp_path, monkeypatch):
    """And nothing is left in it, whatever happens."""

    def fails(*_):
        assert any((tmp_path / "new" / "folder").iterdir())
        raise FinesslError("stops here")

    monkeypatch.setattr("finessl.bench.studio.write_originals", fails)
    with pytest.raises(FinesslError, match="stops here"):
        bench_studio(20, 1, [100], tmp_path / "new" / "folder")
    assert not any((tmp_path / "new" / "folder").iterdir())


def test_memory_of_a_process_and_its_children():
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with MemoryWatch(process.pid) as memory:
            pass
        process.stdin.close()
    if found := memory.figures():  # Linux
        assert found["memory_mb"] <= found["peak_memory_mb"] < 100 < found["peak_of_all_mb"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent has ended")
def test_a_studio_ends_with_the_process_that_started_it(photos, tmp_path):
    code = f"from finessl.bench.running import Running; r = Running({str(photos)!r}, '--out', {str(tmp_path / 'state')!r}); "
    code += "print(r.process.pid, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        studio = int(parent.stdout.readline())
        os.kill(studio, 0)
        parent.kill()
    for _ in range(200):
        if not Path(f"/proc/{studio}/stat").exists() or "Z" in Path(f"/proc/{studio}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the studio is still there")


def test_a_studio_that_does_not_start_says_why(tmp_path):
    with pytest.raises(FinesslError, match=r"did not start. It says: .*nowhere"):
        Running(tmp_path / "nowhere")


def test_without_chromium(monkeypatch):
    monkeypatch.setattr(browser, "NAMES", ("no-such-browser",))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", "/nowhere")
    monkeypatch.delenv("PLAYWRIGHT_CHROMIUM", raising=False)
    with pytest.raises(FinesslError, match="Chromium|Playwright"):
        app(["bench", "studio", "--browser"], standalone_mode=False)


def test_sizes_are_checked():
    with pytest.raises(FinesslError, match="--refit"):
        app(["bench", "studio", "--refit", "10,x"], standalone_mode=False)


def test_a_script_labels_through_the_studio(shapes):
    found = bench_labeling(str(shapes), target=1.0, most=6, pause=0.0, orders=["random"])
    assert [row.order for row in found] == ["random"]
    for row in found:
        assert [labels for labels, _ in row.curve] == list(range(3, row.labels + 1, 3))
        assert row.audited["kind"] == "audited" and row.audited["n"] == min(100, 72 - row.labels)
        assert row.audited["value"] == pytest.approx(row.accuracy, abs=0.05), "all images are audited"
