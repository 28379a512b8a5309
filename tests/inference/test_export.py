"""Exports give the answers of their run, without finessl, or are not written."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import finessl
from finessl.bench import export as bench_export
from finessl.cli import app
from finessl.data.decoding import decode
from finessl.errors import FinesslError
from finessl.inference import export as exporting
from finessl.inference.agreement import GATES, Agreement, Gate, compare, unlabeled_images
from finessl.inference.audit import audit_run, opened, sample_images
from finessl.inference.classifier import squash
from finessl.inference.export import PRECISIONS, export_run
from finessl.inference.export_onnx import calibration_images
from finessl.inference.metrics import softmax
from finessl.inference.onnx_session import (
    OPENVINO,
    OnnxClassifier,
    available_providers,
    open_session,
    openvino_options,
)

from .conftest import MakeRun

onnx = pytest.importorskip("onnx", reason="the extra `export` is not installed")
pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
pytest.importorskip("onnxscript", reason="the extra `export` is not installed")


ODD = ['"ä", =1+1\udcff', "line\nbreak <b>", "日本"]  # \udcff: a byte that is no text


@pytest.fixture(scope="module")
def onnx_folder(make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vpt-deep with the cosine head: what timm cannot hold. With a temperature, and class names of every kind."""
    run = tmp_path_factory.mktemp("odd") / "run"
    shutil.copytree(make_run("vpt-deep", "cosine"), run)
    file = run / "classifier" / "classifier.json"
    description = json.loads(file.read_text(encoding="utf-8"))
    description |= {"classes": ODD, "temperature": 2.0}
    file.write_text(json.dumps(description), encoding="utf-8")
    out = run.parent / "onnx"
    app(["export", str(run), "--out", str(out)], standalone_mode=False)
    return out


def load_script(folder: Path) -> ModuleType:
    module = ModuleType("exported")
    module.__file__ = str(folder / "predict.py")
    exec(compile((folder / "predict.py").read_text(), module.__file__, "exec"), module.__dict__)
    return module


def odd_images(folder: Path) -> list[Path]:
    """A large JPEG that the decoder reduces, a rotated one, transparency, 16 bits, a palette, grey, tiny."""
    rng = np.random.default_rng(0)
    noise = np.kron(rng.integers(0, 256, (20, 30, 3), np.uint8), np.ones((16, 16, 1), np.uint8))
    image = Image.fromarray(noise)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(folder / "large.jpg")
    image.save(folder / "rotated.jpg", exif=exif)
    image.resize((40, 30)).save(folder / "rotated.png", exif=exif)
    alpha = Image.fromarray(rng.integers(0, 256, (40, 50, 4), np.uint8))
    alpha.save(folder / "alpha.png")
    image.resize((50, 30)).convert("P").save(folder / "palette.png", transparency=3)
    Image.fromarray(rng.integers(0, 65536, (40, 40)).astype(np.uint16)).save(folder / "deep.png")
    Image.fromarray(rng.integers(0, 4096, (40, 40)).astype(np.uint16)).save(folder / "twelve.png")
    Image.fromarray(rng.integers(0, 256, (400, 50, 3), np.uint8)).save(folder / "tall.png")
    image.convert("L").resize((20, 10)).save(folder / "grey.png")
    return sorted(folder.iterdir())


def test_onnx_answers_like_its_run(onnx_folder: Path, tmp_path: Path) -> None:
    run = onnx_folder.parent / "run"
    files = odd_images(tmp_path)
    classifier = finessl.load(run, device="cpu", precision="fp32")
    script = load_script(onnx_folder)
    for file in files:
        np.testing.assert_array_equal(script.read(file), squash(decode(file, square=32), 32), err_msg=file.name)
    probabilities, logits, embedding = script.predict(files)
    np.testing.assert_allclose(logits, classifier.logits(files), atol=1e-4)
    np.testing.assert_allclose(probabilities, classifier.predict_proba(files), atol=1e-5)
    np.testing.assert_allclose(embedding, classifier.embed(files), atol=1e-4)
    np.testing.assert_allclose(OnnxClassifier(onnx_folder).predict_proba(files), probabilities, atol=1e-6)
    np.testing.assert_allclose(probabilities, softmax(logits / 2.0), atol=1e-6, err_msg="the temperature is applied")


def test_onnx_takes_any_batch(onnx_folder: Path) -> None:
    session = open_session(onnx_folder / "model.onnx")
    for batch in (1, 2, 7, 33):
        outputs = session.run(None, {"images": np.zeros((batch, 32, 32, 3), np.uint8)})
        assert [output.shape for output in outputs] == [(batch, 3), (batch, 3), (batch, 48)]


def test_export_says_what_it_is(onnx_folder: Path) -> None:
    about = json.loads((onnx_folder / "export.json").read_text())
    assert about["classes"] == ODD
    assert about["check"]["agreement"] == 1.0 and about["check"]["images"] == 24
    assert about["check"]["max_logit_difference"] < 1e-3 and about["check"]["source"].startswith("test images of")
    inside = json.loads(open_session(onnx_folder / "model.onnx").get_modelmeta().custom_metadata_map["finessl"])
    assert inside["classes"] == about["classes"] and inside["image_size"] == 32 and "squash" in inside["resize"]
    assert {path.name for path in onnx_folder.iterdir()} == {"model.onnx", "predict.py", "export.json"}


def test_script_needs_no_finessl(onnx_folder: Path, shapes: Path) -> None:
    """And prints every name of a file or class, on a terminal that has no such letters too."""
    images = [shapes / "test" / name / "00.png" for name in ("across", "diagonal", "down")]
    code = "import sys; sys.modules['finessl'] = sys.modules['torch'] = None\nimport runpy\n"
    code += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(onnx_folder / "predict.py"), *map(str, images)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    labels = [ODD[k] for k in OnnxClassifier(onnx_folder).predict_proba(images).argmax(1)]
    for image, label in zip(images, labels, strict=True):
        assert f"{image}\t{label.encode('ascii', 'backslashreplace').decode()}\t0." in done.stdout
    for name in ("predict_onnx.py", "predict_pt2.py"):
        assert len((Path(exporting.__file__).parent / "scripts" / name).read_text().splitlines()) <= 30


def test_pt2_answers_like_its_run(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("adaptformer", "cosine")
    found = export_run(run, tmp_path / "pt2", format="pt2")
    assert found.agreement == 1.0 and found.max_logit_difference < 1e-4
    images = tmp_path / "images"
    images.mkdir()
    files = odd_images(images)
    probabilities, _, _ = load_script(tmp_path / "pt2").predict(files)
    classifier = finessl.load(run, device="cpu", precision="fp32")
    np.testing.assert_allclose(probabilities, classifier.predict_proba(files), atol=1e-5)


@pytest.mark.parametrize("tuning", ["lora", "ssf", "bitfit", "norm", "full"])
def test_timm_loads_the_merged_model(tuning: str, make_run: MakeRun, shapes: Path, tmp_path: Path) -> None:
    run = make_run(tuning)
    found = export_run(run, tmp_path / "timm", format="timm")
    assert found.agreement == 1.0 and found.max_logit_difference < 1e-4
    model = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    assert model.pretrained_cfg["label_names"] == ["across", "diagonal", "down"]
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    file = shapes / "test" / "down" / "00.png"
    with torch.no_grad():
        logits = model(transform(Image.open(file).convert("RGB")).unsqueeze(0)).numpy()
    classifier = finessl.load(run, device="cpu", precision="fp32")
    np.testing.assert_allclose(logits, classifier.logits(file), atol=1e-4)


def test_model_card(make_run: MakeRun, tmp_path: Path) -> None:
    """Its front matter is YAML that hubs read; classes are listed as they are, or escaped where they are no text."""
    run = Path(shutil.copytree(make_run(), tmp_path / "run"))
    file = run / "classifier" / "classifier.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "classes": ODD}))
    export_run(run, tmp_path / "timm", format="timm")
    _, front, text = (tmp_path / "timm" / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    about = pytest.importorskip("yaml").safe_load(front)
    assert about["library_name"] == "timm" and about["pipeline_tag"] == "image-classification"
    assert text.endswith('- "\\"ä\\", =1+1\\udcff"\n- "line\\nbreak <b>"\n- "日本"\n')
    assert json.loads((tmp_path / "timm" / "config.json").read_text())["label_names"] == ODD


def test_audited_temperature_is_in_every_export(make_run: MakeRun, shapes: Path, tmp_path: Path) -> None:
    """`finessl audit` fits it on judged images; the answers of every format are calibrated by it."""
    run = Path(shutil.copytree(make_run(), tmp_path / "run"))
    paths, _ = sample_images(run, 40)
    rows = [f"{path},{Path(path).parent.name}" for path in paths]
    (tmp_path / "audit.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    audit = audit_run(run, tmp_path / "audit.csv", device="cpu")
    temperature = audit["temperature"]
    assert abs(temperature - 1) > 0.01
    image = shapes / "test" / "down" / "00.png"
    classifier = finessl.load(run, device="cpu", precision="fp32")
    wanted = softmax(classifier.logits(image) / temperature)
    np.testing.assert_allclose(classifier.predict_proba(image), wanted, atol=1e-6)
    for kind in ("onnx", "pt2", "timm"):
        export_run(run, tmp_path / kind, format=kind)
        assert json.loads((tmp_path / kind / "export.json").read_text())["temperature"] == temperature
    for kind in ("onnx", "pt2"):
        np.testing.assert_allclose(load_script(tmp_path / kind).predict([image])[0], wanted, atol=1e-5, err_msg=kind)
    model = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    with torch.no_grad():
        given = model(transform(Image.open(image).convert("RGB")).unsqueeze(0)).softmax(1).numpy()
    np.testing.assert_allclose(given, wanted, atol=1e-5, err_msg="timm")


@pytest.mark.parametrize(
    ("tuning", "head", "reason"),
    [
        ("vpt-deep", "linear", "cannot be merged"),
        ("adaptformer", "linear", "cannot be merged"),
        ("lora", "cosine", "length"),
        ("lora", "centred", "length"),
    ],
)
def test_timm_refuses_what_it_cannot_hold(
    tuning: str, head: str, reason: str, make_run: MakeRun, tmp_path: Path
) -> None:
    with pytest.raises(FinesslError, match=f"{reason}.*--format onnx or pt2"):
        export_run(make_run(tuning, head), tmp_path / "timm", format="timm")
    assert list(tmp_path.iterdir()) == []


def test_disagreement_writes_nothing(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "compare", lambda *_: Agreement(24, "test images", 0.5, 0.9))
    with pytest.raises(FinesslError, match="nothing was written.*90.00%"):
        export_run(make_run(), tmp_path / "timm", format="timm")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(FinesslError, match="exists already"):
            export_run(make_run(), tmp_path / name, format="timm")
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


def test_unknown_choices_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(FinesslError, match="onnx"):
        export_run(make_run(), tmp_path / "x", format="onxn")
    with pytest.raises(FinesslError, match="fp16"):
        export_run(make_run(), tmp_path / "x", precision="fp61")
    with pytest.raises(FinesslError, match="--format onnx"):
        export_run(make_run(), tmp_path / "x", format="timm", precision="int8")
    with pytest.raises(FinesslError, match="opsets 18 to"):
        export_run(make_run(), tmp_path / "x", opset=7)
    with pytest.raises(FinesslError, match="CPUExecutionProvider"):
        open_session(tmp_path / "model.onnx", "Nonexistent")


def test_the_file_has_the_opset_that_was_asked_for(make_run: MakeRun, tmp_path: Path) -> None:
    """onnx knows newer ones than onnxscript can write."""
    for opset in (19, onnx.defs.onnx_opset_version()):
        try:
            export_run(make_run(), tmp_path / str(opset), opset=opset)
        except FinesslError as error:
            assert opset > 19 and str(error).startswith(f"--opset {opset}: ") and not (tmp_path / str(opset)).exists()
        else:
            model = onnx.load(str(tmp_path / str(opset) / "model.onnx"))
            assert [entry.version for entry in model.opset_import if entry.domain == ""] == [opset]


def test_openvino_computes_as_finessl_does(onnx_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, hint in ((True, "bf16"), (False, "f32")):
        monkeypatch.setattr("finessl.inference.onnx_session.supports_bf16", lambda device, found=supported: found)
        plugin = json.loads(openvino_options(2)["load_config"])["CPU"]
        assert plugin == {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": "2"}
    if OPENVINO not in available_providers():
        pytest.skip("this onnxruntime has no OpenVINO provider (onnxruntime-openvino has)")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    plain, fast = (OnnxClassifier(onnx_folder, name).predict_proba(list(pixels)) for name in (None, "OpenVINO"))
    np.testing.assert_allclose(fast, plain, atol=0.02)


def test_unfinished_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text("")
    with pytest.raises(FinesslError, match="not finished"):
        export_run(tmp_path / "run", tmp_path / "out")


def test_full_disk_is_one_sentence(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_json", full)
    with pytest.raises(FinesslError, match="No space left on device"):
        export_run(make_run(), tmp_path / "timm", format="timm")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="limits of a process are POSIX")
@pytest.mark.parametrize("format", ["onnx", "pt2", "timm"])
def test_a_file_that_cannot_be_written_is_one_sentence(format: str, make_run: MakeRun, tmp_path: Path) -> None:
    """In a process of its own: torch's writer of zip files has aborted it."""
    import resource

    command = [sys.executable, "-m", "finessl", "export", str(make_run()), "--format", format, "--out", "out"]
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (60_000, 60_000))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, preexec_fn=limit, env=environment)
    assert done.returncode == 1, done.stderr
    assert "finessl: cannot write to out: " in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_sample_stands_in_for_lost_data(make_run: MakeRun, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(make_run(), run)
    recipe = run / "recipe.toml"
    recipe.write_text(re.sub(r"(?m)^source = .*", 'source = "/nowhere"', recipe.read_text()))
    assert export_run(run, tmp_path / "timm", format="timm").source == "images of the sample"


def test_bench_compares_with_own_prediction(
    onnx_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exported(run: str, out: Path, *, precision: str, weights: None) -> None:
        if precision != "fp32":
            raise FinesslError("int8 does not agree with the run")
        shutil.copytree(onnx_folder, out)

    monkeypatch.setattr(bench_export, "export_run", exported)
    monkeypatch.setattr(bench_export, "supports_bf16", lambda device: True)
    threads = torch.get_num_threads()
    run = str(onnx_folder.parent / "run")
    app(["bench", "export", run, "--batch-size", "4", "--repeats", "1", "--json"], standalone_mode=False)
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert "int8 does not agree" in captured.err
    assert [row["part"] for row in rows] == ["ONNX Runtime, fp32"] * 2
    assert [row["reference"] for row in rows] == ["finessl, fp32", "finessl, bf16"]
    assert all(row["ratio"] > 0 for row in rows) and torch.get_num_threads() == threads


def test_gate() -> None:
    gate = Gate(1e-3, 0.995)
    assert Agreement(10, "", 1e-4, 1.0).passes(gate)
    assert not Agreement(10, "", 1e-2, 1.0).passes(gate)
    assert not Agreement(10, "", 0.0, 0.9).passes(gate)
    assert not Agreement(10, "", float("nan"), 1.0).passes(gate)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_that_are_not_finite_are_refused(precision: str) -> None:
    """An overflow of fp16 gives NaN for every class, and argmax then names class 0."""
    found = compare(lambda x: np.ones((len(x), 3)), lambda x: np.full((len(x), 3), np.nan), np.zeros((9, 1)), "images")
    assert found.agreement == 1.0 and not found.passes(GATES[precision])


def test_int8_is_calibrated_on_unlabeled_images_alone(make_run: MakeRun, tmp_path: Path) -> None:
    """Neither test images nor images whose labels were used; a run without unlabeled images is refused."""
    run = Path(shutil.copytree(make_run(), tmp_path / "run"))
    dataset, split = opened(run)
    pool = np.setdiff1d(split.unlabeled, split.labeled)
    pixels, source = unlabeled_images(run, 32, 1000)
    np.testing.assert_array_equal(pixels, [squash(dataset.train.read(int(i), square=32), 32) for i in pool])
    assert source.startswith("unlabeled images of") and len(split.labeled) and len(pixels) == len(pool)
    dataclasses.replace(split, unlabeled=split.labeled).save(run / "split.json")
    with pytest.raises(FinesslError, match="calibrated on the run's unlabeled images.*no unlabeled image"):
        calibration_images(run, 32)
    (run / "split.json").unlink()
    with pytest.raises(FinesslError, match="calibrated on the run's unlabeled images.*split.json"):
        calibration_images(run, 32)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "int8", "int8-dynamic"])
def test_small_precisions_pass_their_gate(precision: str, make_run: MakeRun, tmp_path: Path) -> None:
    found = export_run(make_run("linear"), tmp_path / "out", precision=precision)
    assert found.agreement >= 0.98 and OnnxClassifier(tmp_path / "out").classes == ["across", "diagonal", "down"]
    about = json.loads((tmp_path / "out" / "export.json").read_text())
    assert about["precision"] == precision and ("calibration" in about) == (precision == "int8")
    graph = onnx.load(str(tmp_path / "out" / "model.onnx")).graph
    weights = [w for w in map(onnx.numpy_helper.to_array, graph.initializer) if w.dtype == np.int8 and w.ndim == 2]
    assert bool(weights) == (precision != "fp16")
    assert all(np.abs(w.astype(int)).max() <= 64 for w in weights), "7 bits: a CPU without VNNI gives the same answers"
    products = {output for node in graph.node if node.op_type == "MatMul" for output in node.output}
    assert not products & {node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"}, "sums keep fp32"
