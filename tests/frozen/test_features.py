"""Features are computed once per image content and encoder, and survive kills, damage and moved files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image

from finessl.data.decoding import squash
from finessl.data.identity import DIGEST_BYTES
from finessl.data.images import ArrayImages, FileImages
from finessl.data.path_table import PathTable
from finessl.errors import FinesslError
from finessl.frozen import features
from finessl.frozen.features import Features, FeatureStore, FrozenEncoder, encode_images
from finessl.models.backbones import create_backbone

CPU = torch.device("cpu")


def photo(seed: int, size: tuple[int, int] = (40, 33)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def folder(root: Path, count: int = 6) -> FileImages:
    root.mkdir()
    for i in range(count):
        Image.fromarray(photo(i)).save(root / f"{i}.png")
    return images_of(root)


def images_of(root: Path) -> FileImages:
    names = sorted(os.listdir(root))
    return FileImages(root, PathTable.of(names, [os.path.getsize(root / name) for name in names]))


def encode(images, precision: str = "fp32", **more) -> Features:  # type: ignore[no-untyped-def]
    return encode_images(images, FrozenEncoder(create_backbone("embedded"), CPU, precision), **more)


def store_folder(cache: Path) -> Path:
    (found,) = [path for path in (cache / "features").iterdir() if path.is_dir()]
    return found


def test_features_are_those_of_the_backbone(tmp_path: Path) -> None:
    images = folder(tmp_path / "photos")
    found = encode(images)
    backbone = create_backbone("embedded")
    pixels = np.stack([squash(images.read(i, square=32), 32) for i in range(len(images))])
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (backbone.mean, backbone.std))
    with torch.inference_mode():
        expected = backbone.encoder.eval()((x - mean) / std)
    assert found.rows.dtype == np.float16 and found.encoded == 6 and found.failures == []
    assert_allclose(found.rows.astype(np.float32), expected.numpy(), atol=5e-3)


def test_second_time_nothing_is_encoded(tmp_path: Path) -> None:
    images = folder(tmp_path / "photos")
    first, again = encode(images), encode(images)
    assert again.encoded == 0
    assert isinstance(again.rows, np.memmap)
    assert_array_equal(again.rows, first.rows)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_encoder_keeps_one_store(tmp_path: Path, own_cache: Path, precision: str) -> None:
    """Converting the weights does not make another backbone of it."""
    encoder = FrozenEncoder(create_backbone("embedded"), CPU, precision)
    encode_images(folder(tmp_path / "photos", 2), encoder)
    encode_images(folder(tmp_path / "more", 3), encoder)
    assert store_folder(own_cache).is_dir()
    assert encode(images_of(tmp_path / "more"), precision).encoded == 0


def test_moved_and_renamed_files_keep_their_features(tmp_path: Path) -> None:
    first = encode(folder(tmp_path / "photos"))
    (tmp_path / "elsewhere").mkdir()
    for i in range(6):
        shutil.move(tmp_path / "photos" / f"{i}.png", tmp_path / "elsewhere" / f"{5 - i}.png")
    again = encode(images_of(tmp_path / "elsewhere"))
    assert again.encoded == 0
    assert_array_equal(again.rows, first.rows[::-1])


def test_changed_file_is_encoded_again(tmp_path: Path) -> None:
    images = folder(tmp_path / "photos")
    first = encode(images)
    Image.fromarray(photo(99)).save(tmp_path / "photos" / "2.png")
    again = encode(images)
    assert again.encoded == 1
    assert (again.rows[2] != first.rows[2]).any()
    assert_array_equal(np.delete(again.rows, 2, 0), np.delete(first.rows, 2, 0))


def test_equal_images_are_encoded_once(tmp_path: Path) -> None:
    images = ArrayImages(np.stack([photo(0), photo(1), photo(0)]), "x")
    found = encode(images)
    assert found.encoded == 2
    assert_array_equal(found.rows[0], found.rows[2])


@pytest.mark.parametrize("kind", ["array", "bmp"])
def test_large_images_that_differ_in_a_few_pixels_have_their_own_features(tmp_path: Path, kind: str) -> None:
    """Uncompressed images share most of their bytes: the whole content counts, not an excerpt of it."""
    pixels = np.full((3, 224, 224, 3), 255, np.uint8)
    pixels[1, 60:90, 60:90], pixels[2, 60:90, 60:90] = 0, (255, 0, 0)
    images = ArrayImages(pixels, "x")
    if kind == "bmp":
        for i in range(3):
            Image.fromarray(pixels[i]).save(tmp_path / f"{i}.bmp")
        images = images_of(tmp_path)  # type: ignore[assignment]
    found = encode(images)
    assert found.encoded == 3 and len(np.unique(found.rows, axis=0)) == 3


def test_broken_images_are_named_and_do_not_stop_the_others(tmp_path: Path) -> None:
    root = tmp_path / "photos"
    folder(root)
    (root / "1.png").write_bytes(b"no image")
    (root / "3.png").write_bytes(b"no image")  # a copy of the broken one
    (root / "4.png").unlink()
    names = [f"{i}.png" for i in range(6)]
    found = encode(FileImages(root, PathTable.of(names, [0] * 6)))
    assert [i for i, _ in found.failures] == [1, 3, 4]
    assert all(reason for _, reason in found.failures)
    assert_array_equal(found.usable(), [True, False, True, False, False, True])
    assert not found.rows[[1, 3, 4]].any() and found.rows[[0, 2, 5]].any(1).all()


def test_broken_images_are_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "photos"
    folder(root)
    (root / "1.png").write_bytes(b"no image")
    images = FileImages(root, PathTable.of([f"{i}.png" for i in range(6)], [0] * 6))
    first = encode(images)
    assert first.encoded == 6
    again = encode(images)
    assert again.encoded == 0 and again.failures == first.failures
    monkeypatch.setattr("PIL.__version__", "0.1")  # another version may read it
    assert encode(images).encoded == 1


def test_a_kill_costs_one_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "CHUNK", 2)
    monkeypatch.setattr(features, "BATCH", {"cpu": 2})
    images = folder(tmp_path / "photos", 8)

    def stop(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(images, progress=stop)
    again = encode(images)
    assert again.encoded == 4
    monkeypatch.setenv("FINESSL_CACHE", str(tmp_path / "other"))
    assert_array_equal(again.rows, encode(images).rows)


@pytest.mark.parametrize("damage", ["flip", "cut", "torn line", "lost rows"])
def test_damaged_chunks_are_encoded_again(
    tmp_path: Path, own_cache: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "CHUNK", 3)
    monkeypatch.setattr(features, "BATCH", {"cpu": 3})
    images = folder(tmp_path / "photos")
    first = encode(images)
    kept = np.array(first.rows)
    rows, chunks = store_folder(own_cache) / "rows.f16", store_folder(own_cache) / "chunks.jsonl"
    content = bytearray(rows.read_bytes())
    if damage == "flip":
        content[10] ^= 255
        rows.write_bytes(content)
    elif damage == "cut":
        rows.write_bytes(content[:-7])
    elif damage == "torn line":
        chunks.write_bytes(chunks.read_bytes()[:-9])
    else:
        rows.unlink()
    again = encode(images)
    assert again.encoded == (6 if damage == "lost rows" else 3)
    assert_array_equal(again.rows, kept)
    assert encode(images).encoded == 0


def test_other_weights_size_or_precision_are_other_features() -> None:
    base = FrozenEncoder(create_backbone("embedded"), CPU, "fp32").identity()
    changed = create_backbone("embedded")
    with torch.no_grad():
        next(p for n, p in changed.encoder.named_parameters() if n.endswith("norm.bias")).add_(1e-3)
    others = {
        FrozenEncoder(changed, CPU, "fp32").identity(),
        FrozenEncoder(create_backbone("embedded", image_size=64), CPU, "fp32").identity(),
        FrozenEncoder(create_backbone("embedded"), CPU, "bf16").identity(),
    }
    assert len(others | {base}) == 4
    assert FrozenEncoder(create_backbone("embedded"), CPU, "fp32").identity() == base


def test_bf16_is_near_fp32(tmp_path: Path) -> None:
    images = folder(tmp_path / "photos")
    full, half = (encode(images, precision=p).rows.astype(np.float32) for p in ("fp32", "bf16"))
    cosine = (full * half).sum(1) / np.linalg.norm(full, axis=1) / np.linalg.norm(half, axis=1)
    assert cosine.min() > 0.999


def test_unwritable_cache_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FINESSL_CACHE", str(tmp_path / "file"))
    with pytest.raises(FinesslError, match="cannot write"):
        encode(folder(tmp_path / "photos", 2))


def test_store_finds_rows_of_many_chunks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    keys, rows = rng.integers(0, 256, (50, DIGEST_BYTES), np.uint8), rng.normal(size=(50, 3)).astype(np.float16)
    store = FeatureStore(tmp_path / "store", 3)
    for start in range(0, 50, 7):
        store.append(keys[start : start + 7], rows[start : start + 7])
    again = FeatureStore(tmp_path / "store", 3)
    order = rng.permutation(50)
    for opened in (store, again):
        assert_array_equal(opened.gather(opened.find(keys[order])), rows[order])
    missing = keys[:1].copy()
    missing[0, 0] ^= 1
    assert again.find(missing).tolist() == [-1]


def test_a_cut_last_row_is_no_obstacle(tmp_path: Path, own_cache: Path) -> None:
    images = folder(tmp_path / "photos")
    first = encode(images)
    with open(store_folder(own_cache) / "rows.f16", "ab") as file:
        file.write(b"abc")
    again = encode(images)
    assert again.encoded == 0
    assert_array_equal(again.rows, first.rows)


@pytest.mark.parametrize("line", ['{"keys": "", "first": Infinity, "crc": 0}', "[" * 5000, "null", '{"keys": 3}'])
def test_lines_of_no_sense_are_passed_over(tmp_path: Path, own_cache: Path, line: str) -> None:
    images = folder(tmp_path / "photos")
    encode(images)
    with open(store_folder(own_cache) / "chunks.jsonl", "a") as file:
        file.write(line + "\n")
    assert encode(images).encoded == 0


@pytest.mark.parametrize("name", ["rows.f16", "chunks.jsonl"])
def test_only_regular_files_are_a_cache(tmp_path: Path, own_cache: Path, name: str) -> None:
    images = folder(tmp_path / "photos", 2)
    encode(images)
    (store_folder(own_cache) / name).unlink()
    os.mkfifo(store_folder(own_cache) / name)
    with pytest.raises(FinesslError, match="not a regular file"):
        encode(images)
