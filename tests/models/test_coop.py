"""CoOp: class weights against open_clip's own text features, what trains, what is kept, and prediction without a tower."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import finessl
from finessl.errors import FinesslError
from finessl.methods import create as create_method
from finessl.methods.base import Batch, HeadOutputs, Outputs, Task
from finessl.models.aliases import BACKBONES, Alias
from finessl.models.backbones import Backbone, create_backbone
from finessl.models.build import build_network
from finessl.models.coop import CoOpHead
from finessl.models.head_init import embed_names, start_heads
from finessl.models.network import Network
from finessl.models.text import PromptedNames
from finessl.recipe import Choice, Recipe
from finessl.training.loop import Settings, train

open_clip = pytest.importorskip("open_clip", reason="text towers need open_clip: pip install 'finessl[text]'")

NAMES = ["across", "diagonal", "sea_lion"]
TEXT = {"context_length": 40, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
KINDS: dict[str, dict[str, Any]] = {
    "clip": {"quick_gelu": True, "text_cfg": TEXT},  # causal, read at the text's end
    "both-ways": {  # every token sees all, read at the last one
        "custom_text": True,
        "text_cfg": {**TEXT, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"},
    },
}
VISION = {"image_size": 32, "patch_size": 16, "layers": 1, "width": 32, "head_width": 16}
WIDTH, DIM = 24, 192  # of text and of image features


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def disturb(model: torch.nn.Module) -> None:
    """No number stays at its default."""
    generator = seeded(1)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small towers that open_clip knows by name, with files of their weights; and one of a small image encoder."""
    folder = tmp_path_factory.mktemp("towers")
    found = {}
    for kind, config in KINDS.items():
        file = folder / f"finessl-{kind}.json"
        file.write_text(json.dumps({"embed_dim": WIDTH, "vision_cfg": VISION, **config}))
        open_clip.add_model_config(file)
        torch.manual_seed(1)
        model = open_clip.create_model(f"finessl-{kind}")
        disturb(model)
        found[kind] = folder / f"{kind}.pt"
        torch.save(model.state_dict(), found[kind])
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0)
    disturb(vit)
    found["vit"] = folder / "vit.safetensors"
    save_file({**vit.state_dict(), "visual_proj": torch.randn(DIM, WIDTH, generator=seeded())}, found["vit"])
    return found


@pytest.fixture(autouse=True)
def aliases(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        alias = Alias("vit_tiny_patch16_224", "", 32, "projection", (f"finessl-{kind}", "none"))
        monkeypatch.setitem(BACKBONES, f"tiny-{kind}", alias)


@pytest.fixture
def make(files: dict[str, Path]) -> Callable[..., Network]:
    def make(tuning: str = "vpt-deep", aux: Any = None, seed: int = 3, kind: str = "clip", **options: Any) -> Network:
        backbone = create_backbone(f"tiny-{kind}", weights=files["vit"])
        head = Choice("coop", {"text_weights": str(files[kind]), **options})
        return build_network(backbone, NAMES, Choice(tuning), head, aux, seeded(seed))[1]

    return make


def tower(files: dict[str, Path], kind: str) -> Any:
    model = open_clip.create_model(f"finessl-{kind}")
    model.load_state_dict(torch.load(files[kind], weights_only=True))
    return model.eval()


def coop(network: Network) -> CoOpHead:
    assert isinstance(network.head, CoOpHead)
    return network.head


# ---- the class weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_words_of_a_template_it_is_clip(make: Callable[..., Network], files: dict, kind: str) -> None:
    network, model = make(kind=kind, context_init="a photo of a"), tower(files, kind)
    texts = ["a photo of a across.", "a photo of a diagonal.", "a photo of a sea lion."]
    with torch.no_grad():
        expected = F.normalize(model.encode_text(open_clip.get_tokenizer(f"finessl-{kind}")(texts)), dim=1)
    torch.testing.assert_close(coop(network).class_weights(), expected, rtol=1e-5, atol=1e-6)
    assert coop(network).context.shape == (4, 32) and expected.std(0).max() > 0.01

    features = torch.randn(5, DIM, generator=seeded())
    images = F.normalize(features @ load_file(files["vit"])["visual_proj"], dim=1)
    logits = network.classify(features).logits
    torch.testing.assert_close(logits, model.logit_scale.exp() * images @ expected.T, rtol=1e-4, atol=1e-4)


def test_any_context_stands_between_the_start_and_the_name(make: Callable[..., Network], files: dict) -> None:
    """The tower's parts put together by hand, at its full length."""
    head, model = coop(make(length=7)), tower(files, "clip")
    assert head.context.std().item() == pytest.approx(0.02, rel=0.2)
    tokens = open_clip.get_tokenizer("finessl-clip")(["across.", "diagonal.", "sea lion."])
    with torch.no_grad():
        words = model.token_embedding(tokens)
        x = torch.cat([words[:, :1], head.context.expand(3, 7, 32), words[:, 1:-7]], 1) + model.positional_embedding
        x = model.ln_final(model.transformer(x, attn_mask=model.attn_mask))
        ends = 7 + (tokens == 49407).int().argmax(1)
        expected = F.normalize(x[torch.arange(3), ends] @ model.text_projection, dim=1)
    torch.testing.assert_close(head.class_weights(), expected, rtol=1e-5, atol=1e-6)
    assert head.names.tokens.shape[1] == max(ends) + 1 < 40  # nothing is computed beyond the longest text


def test_a_tokenizer_without_a_start_token(files: dict) -> None:
    plain = open_clip.get_tokenizer("finessl-clip")

    def tokenizer(texts: list[str]) -> Tensor:
        return F.pad(plain(texts)[:, 1:], (0, 1))

    model, texts = tower(files, "clip"), [f"a photo of a {name}." for name in ("across", "diagonal", "sea lion")]
    with torch.no_grad():
        expected = model.encode_text(tokenizer(texts))
    names = PromptedNames(model, tokenizer, NAMES, words="a photo of a", length=0)
    assert names.start == 0 and names.initial is not None
    torch.testing.assert_close(names(names.initial), expected, rtol=1e-5, atol=1e-5)


def test_features_in_the_text_space_need_no_projection(files: dict) -> None:
    encoder = torch.nn.Module()
    backbone = Backbone(encoder, "tiny-both-ways", WIDTH, 32, (0.5,) * 3, (0.5,) * 3)  # type: ignore[arg-type]
    head = CoOpHead(backbone, NAMES, text_weights=str(files["both-ways"]))
    assert torch.equal(head.projection, torch.eye(WIDTH))


# ---- what trains, and what is kept ----------------------------------------------------------------------------------


def test_context_and_prompts_train_and_the_tower_never(make: Callable[..., Network]) -> None:
    network = make(aux="attached", learn_scale=True)
    assert list(network.trained()) == ["encoder.prompts", "head.context", "head.scale", "aux.context", "aux.scale"]
    assert list(make("linear").trained()) == ["head.context"]
    view = network(torch.randn(4, 3, 32, 32, generator=seeded()))
    assert view.aux is not None and torch.equal(view.logits, view.aux)
    (view.logits.square().sum() + view.aux.exp().sum()).backward()
    for name, parameter in network.named_parameters():
        if name in network.trained():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name


def test_the_auxiliary_head_shares_the_tower(make: Callable[..., Network]) -> None:
    one, two = make(), make(aux="detached")
    assert isinstance(two.aux, CoOpHead)
    assert two.aux.names is coop(two).names and two.aux.context is not coop(two).context
    assert two.count()[1] - one.count()[1] == 16 * 32 + 1  # a context and a scale
    assert not any(module.training for module in two.train().head.names.modules())  # type: ignore[union-attr]
    sizes = sum(tensor.numel() for tensor in two.trainable_state_dict().values())
    assert sizes == two.trained()["encoder.prompts"].numel() + 2 * 16 * 32


def test_trained_tensors_are_the_state(make: Callable[..., Network]) -> None:
    images = torch.randn(2, 3, 32, 32, generator=seeded())
    first, second = make(aux="detached", seed=1), make(aux="detached", seed=2)
    assert not torch.allclose(first(images).logits, second(images).logits)
    second.load_trainable_state_dict(first.trainable_state_dict())
    assert torch.equal(first(images).logits, second(images).logits)
    with torch.no_grad():
        coop(first).context.add_(1)
    first.reset()
    assert torch.equal(first(images).logits, second(images).logits)


def test_evaluation_asks_the_tower_once(make: Callable[..., Network]) -> None:
    network, features = make(), torch.randn(2, DIM, generator=seeded())
    calls = []
    coop(network).names.register_forward_hook(lambda *_: calls.append(1))
    network.eval()
    with torch.no_grad():
        before = [network.classify(features).logits for _ in range(3)]
        assert len(calls) == 1 and torch.equal(before[0], before[2])
        coop(network).context.mul_(20)
        assert not torch.allclose(network.classify(features).logits, before[0])
        assert len(calls) == 2
        network.train().eval()
        network.classify(features)
        assert len(calls) == 3
    network.classify(features)
    assert len(calls) == 4  # with gradient: always


def test_prompts_on_both_sides_learn(make: Callable[..., Network]) -> None:
    network = make()
    task = Task(classes=3, unlabeled=12, steps=30, labeled=6)
    method = create_method("grip", task, {"warmup": 0.0, "iterations": 1})
    truth = torch.arange(12) % 3
    assert not method.refresh(F.one_hot(truth, 3).float())
    patterns, noise = (torch.randn(n, 3, 32, 32, generator=seeded(n)) for n in (3, 18))
    images = patterns[torch.cat([truth[:6], truth])] + 0.3 * noise
    optimizer = torch.optim.SGD(network.parameter_groups(lr=0.003, weight_decay=0.0), momentum=0.9)
    start, losses = {n: p.detach().clone() for n, p in network.trained().items()}, []
    for _ in range(20):
        labeled, weak = network(images).logits.split([6, 12])
        result = method(Outputs(HeadOutputs(labeled), HeadOutputs(weak)), Batch(truth[:6], torch.arange(12)))
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        losses.append(result.loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(not torch.equal(parameter, start[name]) for name, parameter in network.trained().items())


# ---- a run, its checkpoint and its classifier -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["grip", "finessl"])  # without and with an auxiliary head
def test_a_run_predicts_without_open_clip(
    files: dict, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    recipe = Recipe.read(
        None,
        {
            "data.source": str(shapes),
            "split.labels_per_class": 4,
            "model.backbone": "tiny-clip",
            "model.weights": str(files["vit"]),
            "head.name": "coop",
            "head.text_weights": str(files["clip"]),
            "method.name": method,
            "train.batch_size": 4,
            "train.steps": 4,
        },
    )
    train(recipe, tmp_path / "run", Settings(device="cpu", quiet=True))
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    kept = {"encoder.prompts", "head.context", *(["aux.context"] if method == "finessl" else [])}
    assert set(load_file(checkpoint / "trained.safetensors")) == kept
    trained = np.load(tmp_path / "run" / "predictions.npz")["logits"]

    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ImportError):
        import open_clip  # noqa: F401
    classifier = finessl.load(tmp_path / "run", device="cpu")
    assert classifier.description["head"] == {"name": "projected", "width": WIDTH}
    if classifier.network.aux is not None:  # has learned a context of its own
        assert not torch.equal(classifier.network.aux.weight, classifier.network.head.weight)  # type: ignore[arg-type]
    pictures = sorted((shapes / "test").glob("*/*.png"))
    probabilities = classifier.predict_proba(pictures)
    np.testing.assert_allclose(probabilities, torch.from_numpy(trained).softmax(1), rtol=1e-4, atol=1e-6)


# ---- mistakes -------------------------------------------------------------------------------------------------------


def build(backbone: str = "tiny-clip", weights: Path | None = None, **options: Any) -> None:
    made = create_backbone(backbone, weights=weights, pretrained=False)
    build_network(made, NAMES, Choice("linear"), Choice("coop", options), None, seeded())


def test_backbones_without_text() -> None:
    with pytest.raises(FinesslError, match="embedded has no text tower; --head coop works with clip-vit-b16"):
        build("embedded")


def test_weights_without_the_projection(files: dict) -> None:
    with pytest.raises(
        FinesslError, match="24 numbers, tiny-clip's features 192, and its weights carry no visual_proj"
    ):
        build(text_weights=str(files["clip"]))


def test_without_open_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(FinesslError, match=r"--head coop needs open_clip: pip install 'finessl\[text\]'"):
        build(text_weights="tower.pt")


def test_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finessl.models.text.unreachable", lambda *_: "huggingface.co: no such name")
    made = Backbone(torch.nn.Module(), "clip-vit-b16", 768, 224, (0.5,) * 3, (0.5,) * 3)  # type: ignore[arg-type]
    with pytest.raises(FinesslError, match="openai.*huggingface.co: no such name.*--set head.text_weights=FILE"):
        CoOpHead(made, NAMES)
    with pytest.raises(FinesslError, match="huggingface.co: no such name.*--text-features"):
        embed_names(made, NAMES)


def test_a_file_of_another_tower(files: dict, tmp_path: Path) -> None:
    weights = torch.load(files["clip"], weights_only=True)
    weights["ln_final.weight"] = torch.ones(64)
    weights["transformer.resblocks.2.ln_1.bias"] = weights.pop("text_projection")
    torch.save(weights, tmp_path / "other.pt")
    with pytest.raises(FinesslError) as caught:
        build(text_weights=str(tmp_path / "other.pt"))
    message = str(caught.value)
    assert "does not fit the text tower finessl-clip" in message
    assert "1 missing in the file (text_projection)" in message
    assert "1 unknown to the text tower finessl-clip (transformer.resblocks.2.ln_1.bias)" in message
    assert "ln_final.weight is [64] in the file, [32] in the text tower" in message


def test_openai_files_hold_sizes_and_half_precision(files: dict, tmp_path: Path, make: Callable[..., Network]) -> None:
    weights = {name: tensor.half() for name, tensor in torch.load(files["clip"], weights_only=True).items()}
    torch.save({**weights, "context_length": torch.tensor(40)}, tmp_path / "openai.pt")
    theirs = coop(make(text_weights=str(tmp_path / "openai.pt"))).class_weights()
    assert theirs.dtype is torch.float32
    torch.testing.assert_close(theirs, coop(make()).class_weights(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "at least 1"),
        ({"length": 36}, r"36 context vectors and the class 'diagonal' do not fit in the text tower's 40 tokens"),
        ({"length": 50}, "smaller head.length"),
        ({"width": 3}, "has no option 'width'.* length, context_init, learn_scale, text_weights"),
    ],
)
def test_lengths_and_options(files: dict, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FinesslError, match=message):
        build(weights=files["vit"], text_weights=str(files["clip"]), **options)


def test_other_starts_make_no_sense(make: Callable[..., Network], files: dict) -> None:
    labeled = torch.randn(6, DIM, generator=seeded()), torch.arange(6) % 3
    backbone = create_backbone("tiny-clip", weights=files["vit"])
    with pytest.raises(FinesslError, match="leave out --head-init.*context_init"):
        start_heads(make(), "class-mean", backbone=backbone, classes=NAMES, labeled=lambda: labeled)
