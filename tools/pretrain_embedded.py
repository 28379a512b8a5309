"""Pretrain the embedded backbone: a small ViT learns DINOv2's features of CIFAR-100's images, labels unused.

    python tools/pretrain_embedded.py --data cifar100 --dinov2 dinov2-vit-s14.fp16.safetensors \
        --out finessl/assets/embedded.safetensors --minutes 8.5
    python tools/pretrain_embedded.py --data cifar100 --out /tmp/e.safetensors --device cpu --smoke   # a few tiny steps

Function matching: teacher and student see the same random crop, mixed with another image (mixup or cutmix) half of the
time, because 50,000 small images alone would be learnt by heart. The teacher at 224 px costs several times the student,
so its answers go to a replay buffer on the device: every student step draws from the buffer (with fresh flips and
colours), every `replay` steps a chunk of new views overwrites the oldest. So the views stay fresh, and most of the time
goes to student steps. Targets are standardised per dimension. The losses are the cosine distance of the class token and
of the patch tokens through linear heads (thrown away after), and the divergence between the two models' neighbour
distributions within the batch, on the very features that are shipped. `--clip` adds CLIP's class token as a further
target. The learning rate follows the clock, so that the run ends in time on any machine. Writes OUT (float16, timm's
keys) and, next to it, a `.training.json` with the recipe, the time and the results.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from pretrain_report import measure, read_stacks
from pretrain_views import Statistics, colour_maps, fresh_views, normalise, recolour
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

ASSETS = Path(__file__).resolve().parent.parent / "finessl" / "assets"
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
OPENAI = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


@dataclass(frozen=True)
class Recipe:
    batch: int = 1024
    chunk: int = 1024  # new views per visit to the teacher
    replay: int = 6  # student steps per chunk
    buffer: int = 500_000  # views kept, with the teacher's answers
    fill: int = 64  # chunks before the first step
    teacher_size: int = 224
    clip_share: float = 0.25  # share of a chunk that CLIP, three times as dear as DINOv2, answers too
    lr: float = 1.5e-3
    weight_decay: float = 0.05
    warmup: float = 0.04  # share of the time
    ema: float = 0.999
    temperature: float = 0.1  # of the neighbour distributions
    patch_weight: float = 0.5
    clip_weight: float = 0.5
    reserve: float = 12.0  # seconds kept for the last report
    report: float = 15.0  # seconds between progress lines
    steps: int = 10**9  # a smoke test stops early
    per_class: int | None = None  # images read per class


SMOKE = Recipe(
    batch=8, chunk=8, replay=2, buffer=32, fill=2, teacher_size=112, reserve=0, report=0, steps=4, per_class=4
)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Float tensors; int8 matrices carry a `<key>.scale`, one per row."""
    packed = load_file(path)
    scales = {key.removesuffix(".scale"): value for key, value in packed.items() if key.endswith(".scale")}
    weights = {key: value.float() for key, value in packed.items() if not key.endswith(".scale")}
    return {key: value * scales[key][:, None] if key in scales else value for key, value in weights.items()}


def load_teacher(name: str, path: Path | None, size: int) -> VisionTransformer:
    """A frozen timm teacher for `size` pixels; without a file a tiny random one, for smoke tests."""
    if path is None:
        return VisionTransformer(img_size=size, patch_size=14, embed_dim=32, depth=1, num_heads=2, num_classes=0)
    model = timm.create_model(name, pretrained=False, img_size=size, num_classes=0)
    assert isinstance(model, VisionTransformer)
    weights = read_weights(path)
    weights.pop("visual_proj", None)
    weights["pos_embed"] = resample_abs_pos_embed(weights["pos_embed"], list(model.patch_embed.grid_size))
    model.load_state_dict(weights)
    return model


class Answers(NamedTuple):
    """What the teachers say of n views."""

    token: Tensor  # [n, D] DINOv2's class token
    patches: Tensor  # [n, 64, D] its patch tokens, averaged to the student's 8x8 grid
    clip: Tensor | None  # [n, E] CLIP's class token, zero where CLIP was not asked


class Teachers:
    """DINOv2, and CLIP for the first `clip_share` of every chunk; answers are standardised per dimension."""

    def __init__(self, models: list[VisionTransformer], recipe: Recipe, grid: int, device: torch.device):
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        frozen = [m.to(device, self.dtype).eval().requires_grad_(False) for m in models]
        self.forwards: list[Callable[[Tensor], Tensor]] = [m.forward_features for m in frozen]
        self.asked = max(1, int(recipe.chunk * recipe.clip_share))
        self.grid = grid
        self.moments: list[tuple[Tensor, Tensor]] = []

    def raw(self, views: Tensor) -> list[Tensor]:
        tokens = self.forwards[0](normalise(views, IMAGENET))
        side = math.isqrt(tokens.shape[1] - 1)
        patches = tokens[:, 1:].transpose(1, 2).unflatten(2, (side, side))
        pooled = F.adaptive_avg_pool2d(patches, self.grid).flatten(2).transpose(1, 2)
        answers = [tokens[:, 0].float(), pooled.float()]
        if len(self.forwards) > 1:
            answers.append(self.forwards[1](normalise(views[: self.asked], OPENAI))[:, 0].float())
        return answers

    @torch.no_grad()
    def calibrate(self, chunks: list[Tensor]) -> None:
        """Take mean and deviation of every answer's dimensions from a few chunks of views."""
        answers = [torch.cat(parts).flatten(0, -2) for parts in zip(*(self.raw(c) for c in chunks), strict=True)]
        self.moments = [(a.mean(0), a.std(0) + 1e-6) for a in answers]

    @torch.no_grad()
    def __call__(self, views: Tensor) -> Answers:
        answers = [(a - mean) / std for a, (mean, std) in zip(self.raw(views), self.moments, strict=True)]
        clip = None
        if len(answers) > 2:
            clip = F.pad(answers[2], (0, 0, 0, len(views) - self.asked))
        return Answers(answers[0], answers[1], clip)


class Buffer:
    """The latest views and the teachers' answers, on the device."""

    def __init__(self, capacity: int, example: Answers, device: torch.device):
        half = torch.bfloat16
        shapes = [tuple(a.shape[1:]) for a in example if a is not None]
        if device.type == "cuda":  # leave half of the memory to the models
            capacity = min(capacity, int(torch.cuda.mem_get_info()[0] / 2 / (3072 + 2 * sum(map(math.prod, shapes)))))
        self.images = torch.empty(capacity, 3, 32, 32, dtype=torch.uint8, device=device)
        self.answers = [torch.empty(capacity, *shape, dtype=half, device=device) for shape in shapes]
        self.capacity, self.written, self.device = capacity, 0, device

    def write(self, images: Tensor, answers: Answers) -> None:
        at = torch.arange(self.written, self.written + len(images), device=self.device) % self.capacity
        self.images[at] = (images.float() * 255).round().to(torch.uint8)
        for store, answer in zip(self.answers, [a for a in answers if a is not None], strict=True):
            store[at] = answer.to(store.dtype)
        self.written += len(images)

    def draw(self, n: int) -> tuple[Tensor, Answers]:
        """Images in [0, 1] with new flips and colours, and the answers, flipped alike."""
        at = torch.randint(min(self.written, self.capacity), (n,), device=self.device)
        token, patches, *clip = (store[at] for store in self.answers)
        flip = torch.rand(n, 1, 1, 1, device=self.device) < 0.5
        images = self.images[at].float() / 255
        images = recolour(torch.where(flip, images.flip(3), images), colour_maps(n, 0.2, self.device))
        side = math.isqrt(patches.shape[1])
        square = patches.unflatten(1, (side, side))
        patches = torch.where(flip, square.flip(2), square).flatten(1, 2)
        return images, Answers(token, patches, clip[0] if clip else None)


class Distillation(nn.Module):
    """The student, its linear heads and the losses [token, relation, patches, clip]."""

    def __init__(self, vit: VisionTransformer, example: Answers, temperature: float):
        super().__init__()
        self.vit, self.temperature = vit, temperature
        self.heads = nn.ModuleList([nn.Linear(vit.embed_dim, a.shape[-1]) for a in example if a is not None])

    def neighbours(self, features: Tensor) -> Tensor:
        """Log-probabilities [n, n] that an image names each other one of the batch as its neighbour."""
        features = F.normalize(features.float(), dim=1)
        self_mask = torch.eye(len(features), device=features.device) * 1e4
        with torch.autocast(features.device.type, enabled=False):  # similarities need more than bfloat16's 8 bits
            return F.log_softmax(features @ features.T / self.temperature - self_mask, dim=1)

    def forward(self, images: Tensor, answers: Answers) -> Tensor:
        features = self.vit.forward_features(images)
        token, patches = features[:, 0], features[:, 1:]
        predicted = [head(f) for head, f in zip(self.heads, (token, patches, token), strict=False)]
        away = [
            1 - F.cosine_similarity(p.float(), a.float(), dim=-1)
            for p, a in zip(predicted, [a for a in answers if a is not None], strict=True)
        ]
        wanted = self.neighbours(answers.token)
        relation = (wanted.exp() * (wanted - self.neighbours(token))).sum(1).mean()
        clip = token.new_zeros(())
        if answers.clip is not None:
            asked = (answers.clip != 0).any(1).float()
            clip = (away[2] * asked).sum() / asked.sum().clamp(min=1)
        return torch.stack([away[0].mean(), relation, away[1].mean(), clip.float()])


def compiled(function: Callable[..., Any], name: str, *example: Any) -> Callable[..., Any]:
    """torch.compile, proved on an example; eager where that fails."""
    start = time.time()
    try:
        fast = torch.compile(function, dynamic=False)
        output = fast(*example)
        if output.requires_grad:
            output.sum().backward()
        torch.cuda.synchronize()
    except Exception as error:  # a failed compilation must not end the run
        print(f"{name}: torch.compile failed ({type(error).__name__}: {str(error)[:300]}); running eagerly")
        return function
    print(f"{name}: compiled in {time.time() - start:.0f} s")
    return fast


def sound(*modules: nn.Module) -> bool:
    """Whether float16, the format that ships, holds every weight. Waits for the device."""
    return all(bool(p.half().isfinite().all()) for module in modules for p in module.parameters())


def learning_rate(progress: float, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine to zero, by the share of the time that has passed."""
    if progress < recipe.warmup:
        return recipe.lr * max(progress, 1e-3) / recipe.warmup
    return recipe.lr / 2 * (1 + math.cos(math.pi * min(1.0, (progress - recipe.warmup) / (1 - recipe.warmup))))


def pretrain(args: argparse.Namespace, recipe: Recipe, config: dict[str, Any]) -> dict[str, Any]:
    """Train within `args.minutes`, write `args.out` and its JSON file; returns what the JSON file says."""
    began, device = time.time(), torch.device(args.device)
    cuda = device.type == "cuda"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    deadline = began + 60 * args.minutes - recipe.reserve
    statistics: Statistics = (tuple(config["mean"]), tuple(config["std"]))
    sets = {
        name: (read_stacks(folder / "train", recipe.per_class), read_stacks(folder / "test", recipe.per_class))
        for name, folder in (("cifar100", args.data), ("sample", args.sample))
    }
    pool = sets["cifar100"][0][0].to(device)  # the labels stay behind
    print(f"{len(pool)} images read in {time.time() - began:.0f} s")

    vit = VisionTransformer(**config["vit"]).to(device)
    dino = load_teacher("vit_small_patch14_dinov2.lvd142m", args.dinov2, recipe.teacher_size)
    models = [dino]
    if args.clip:
        models.append(load_teacher("vit_base_patch16_clip_quickgelu_224.openai", args.clip, recipe.teacher_size))
    teachers = Teachers(models, recipe, config["vit"]["img_size"] // config["vit"]["patch_size"], device)

    def new_views() -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(pool), (recipe.chunk,), device=device)
        return fresh_views(pool[chosen], recipe.teacher_size, teachers.dtype)

    with torch.no_grad():
        if cuda:
            chunk = new_views()[1]
            for i, count in enumerate([recipe.chunk, teachers.asked][: len(models)]):
                teachers.forwards[i] = compiled(teachers.forwards[i], f"teacher {i + 1}", chunk[:count])
        teachers.calibrate([new_views()[1] for _ in range(4)])
        example = teachers(new_views()[1])
    buffer = Buffer(recipe.buffer, example, device)

    @torch.no_grad()
    def visit_teachers() -> None:
        small, large = new_views()
        buffer.write(small, teachers(large))

    start = time.time()
    for _ in range(recipe.fill):
        visit_teachers()
    if cuda:
        torch.cuda.synchronize()
    teacher_rate = buffer.written / (time.time() - start)
    print(f"buffer of {buffer.capacity} views; the teachers alone: {teacher_rate:.0f} images/s")

    student = Distillation(vit, example, recipe.temperature).to(device).train()
    weights = torch.tensor([1.0, 1.0, recipe.patch_weight, recipe.clip_weight], device=device)

    def losses_of(images: Tensor, answers: Answers) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            return student(images, answers)

    def draw() -> tuple[Tensor, Answers]:
        images, answers = buffer.draw(recipe.batch)
        return normalise(images, statistics), answers

    step_losses = compiled(losses_of, "student", *draw()) if cuda else losses_of
    parameters = list(student.parameters())
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.98), fused=cuda)
    optimiser.zero_grad()  # the compiler's trial left gradients
    average = VisionTransformer(**config["vit"]).to(device).eval().requires_grad_(False)
    average.load_state_dict(vit.state_dict())
    averaged: list[Tensor] = list(average.parameters())
    current: list[Tensor] = list(vit.parameters())

    record: dict[str, Any] = {
        "config": config,
        "recipe": asdict(recipe),
        "teachers": [p.name for p in (args.dinov2, args.clip) if p],
        "seed": args.seed,
        "machine": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "teacher_images_per_second": round(teacher_rate),
        "reports": [],
    }

    def report(step: int) -> None:
        """Save first: a report that fails must not cost the weights, nor broken weights the last good file."""
        args.out.parent.mkdir(parents=True, exist_ok=True)
        if sound(average):
            save_file({key: value.half().contiguous().cpu() for key, value in average.state_dict().items()}, args.out)
        figures: dict[str, float] = {}
        try:
            figures = measure(average, sets, statistics, device)
        except Exception as error:
            print(f"report failed ({type(error).__name__}: {error}); training goes on")
        minutes = round((time.time() - began) / 60, 2)
        record.update(steps=step, minutes=minutes, student_views=step * recipe.batch, teacher_views=buffer.written)
        record["reports"].append({"step": step, "minutes": minutes, **figures})
        args.out.with_suffix(".training.json").write_text(json.dumps(record, indent=2) + "\n")
        print(f"report at {minutes:.1f} min, step {step}: " + ", ".join(f"{k} {v:.1f}" for k, v in figures.items()))

    started = logged = time.time()
    logged_step, logged_written = 0, buffer.written
    due, scale = [0.25, 0.5, 0.75], 1.0
    good = copy.deepcopy((student.state_dict(), average.state_dict()))
    step = 0
    while step < recipe.steps and (now := time.time()) < deadline:
        progress = (now - started) / (deadline - started)
        if step % recipe.replay == 0:
            visit_teachers()
        for group in optimiser.param_groups:
            group["lr"] = scale * learning_rate(progress, recipe)
        losses = step_losses(*draw())
        (losses * weights).sum().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        torch._foreach_lerp_(averaged, current, max(1 - recipe.ema, 1 / (step + 1)))
        step += 1
        if time.time() - logged >= recipe.report:
            values = losses.tolist()  # waits for the device: only here
            if all(map(math.isfinite, values)) and sound(student, average):
                good = copy.deepcopy((student.state_dict(), average.state_dict()))
            else:
                print("the loss or the weights are not finite: back to the last good ones, at half the learning rate")
                scale /= 2
                student.load_state_dict(good[0])
                average.load_state_dict(good[1])
                optimiser.state.clear()
            seconds = time.time() - logged
            print(
                f"{time.time() - began:5.0f} s, {100 * progress:3.0f} %, step {step}, lr {group['lr']:.1e}: token "
                f"{values[0]:.3f}, relation {values[1]:.3f}, patches {values[2]:.3f}, clip {values[3]:.3f}; student "
                f"{(step - logged_step) * recipe.batch / seconds:.0f} images/s, teacher "
                f"{(buffer.written - logged_written) / seconds:.0f} images/s"
            )
            logged, logged_step, logged_written = time.time(), step, buffer.written
        if due and progress > due[0]:
            due.pop(0)
            report(step)
    report(step)
    return record


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="CIFAR-100: train/ and test/ with <class>.webp stacks")
    parser.add_argument("--sample", type=Path, default=ASSETS / "sample", help="a set for the reports, laid out alike")
    parser.add_argument("--dinov2", type=Path, help="timm weights of vit_small_patch14_dinov2.lvd142m")
    parser.add_argument("--clip", type=Path, help="timm weights of vit_base_patch16_clip_quickgelu_224.openai")
    parser.add_argument("--out", type=Path, required=True, help="the student's weights, .safetensors")
    parser.add_argument("--minutes", type=float, default=8.5, help="all of it: reading, compiling, training, reports")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps; a random teacher without --dinov2")
    args = parser.parse_args(arguments)
    if args.dinov2 is None and not args.smoke:
        parser.error("--dinov2 is needed: only --smoke runs with a random teacher")
    config = json.loads((ASSETS / "embedded.json").read_text())
    return pretrain(args, SMOKE if args.smoke else Recipe(), config)


if __name__ == "__main__":
    main()
