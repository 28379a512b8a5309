"""A slice of `make fuzz` with a fixed seed, and properties of the readers that Hypothesis checks."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from finessl.data.decoding import ImageError, decode
from finessl.data.sources.table import open_table
from finessl.errors import FinesslError
from finessl.recipe import Recipe, parse_setting

ROOT = Path(__file__).resolve().parents[2]
FILES = "images,tables,options,recipes,weights,text-features,shards,cifar,tar-files"
WORK = "run-directories,unfinished-runs,groups-of-runs,names,terminals,places,data-places,full-disks,kills,signals"
FROZEN = "quick,select,labels,feature-caches,caches,audits,parts,damaged-parts,predict-options,sorted-names,exports"
SIXTY_EXAMPLES = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kinds", [FILES, WORK, FROZEN], ids=["files", "work", "frozen"])
def test_a_slice_of_make_fuzz(kinds: str, tmp_path: Path) -> None:
    command = [sys.executable, "tests/fuzz", "--only", kinds, "--cases", "60", "--minutes", "0.4", "--jobs", "1"]
    done = subprocess.run([*command, "--journal", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@SIXTY_EXAMPLES
@given(st.text(), st.text())
def test_any_setting_is_read_or_explained(name: str, value: str) -> None:
    try:
        setting, content = parse_setting(f"{name}={value}")
        Recipe.read(None, {setting: content})
    except FinesslError as error:
        assert str(error)


SECTIONS = st.sampled_from(
    ["train.lr", "train.steps", "method.alpha", "data.image_size", "tuning.name", "head.init", "seed"]
)
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.dates()
    | st.lists(st.integers(), max_size=3)
)


@SIXTY_EXAMPLES
@given(st.dictionaries(SECTIONS, PLAIN, max_size=3))
def test_any_value_is_taken_or_explained(overrides: dict[str, object]) -> None:
    try:
        Recipe.read(None, overrides)
    except FinesslError as error:
        assert str(error)


def photo(form: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)).save(buffer, form)
    return buffer.getvalue()


PHOTOS = [photo(form) for form in ("PNG", "JPEG", "GIF", "TIFF", "BMP", "WEBP")]


@SIXTY_EXAMPLES
@given(st.sampled_from(PHOTOS), st.data())
def test_any_bytes_are_an_image_or_an_image_error(content: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(content)))
    content = (
        content[:place] + data.draw(st.binary(max_size=40)) + content[data.draw(st.integers(place, len(content))) :]
    )
    try:
        array = decode(content, square=8)
        assert array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3
    except ImageError as error:
        assert str(error)


@SIXTY_EXAMPLES
@given(st.binary(max_size=300))
def test_any_bytes_are_a_table_or_explained(tmp_path: Path, content: bytes) -> None:
    table = tmp_path / "table.csv"
    table.write_bytes(b"path,label\n" + content)
    with pytest.raises(FinesslError):  # no row names an image that exists
        open_table(table)
