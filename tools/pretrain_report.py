"""What tools/pretrain_embedded.py reads and reports: WebP stacks in; k-NN, linear probe and few-label accuracy out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from pretrain_views import Statistics, normalise
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

Part = tuple[Tensor, Tensor]  # images uint8 [N, 3, 32, 32], labels [N]


def read_stacks(folder: Path, per_class: int | None) -> Part:
    """Images uint8 [N, 3, 32, 32] and labels [N] of `<class>.webp` stacks, classes in the order of their names."""
    paths = sorted(folder.glob("*.webp"))
    if not paths:
        raise SystemExit(f"no .webp stacks in {folder}: --data and --sample want folders with train/ and test/")
    with ThreadPoolExecutor() as pool:
        stacks = list(pool.map(lambda p: np.asarray(Image.open(p).convert("RGB")).reshape(-1, 32, 32, 3), paths))
    stacks = [stack[:per_class] for stack in stacks]
    labels = np.repeat(np.arange(len(stacks)), [len(stack) for stack in stacks])
    return torch.from_numpy(np.concatenate(stacks)).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)


@torch.no_grad()
def features_of(vit: VisionTransformer, images: Tensor, statistics: Statistics, device: torch.device) -> Tensor:
    parts = []
    for part in images.split(2048):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            parts.append(vit(normalise(part.to(device).float() / 255, statistics)).float())
    return F.normalize(torch.cat(parts), dim=1)


def knn(bank: Tensor, labels: Tensor, queries: Tensor, truth: Tensor, k: int = 20, temperature: float = 0.07) -> float:
    right = 0
    for part, answer in zip(queries.split(2000), truth.split(2000), strict=True):
        similarity, index = (part @ bank.T).topk(min(k, len(bank)))
        votes = torch.zeros(len(part), int(labels.max()) + 1, device=bank.device)
        votes.scatter_add_(1, labels[index], (similarity / temperature).exp())
        right += int((votes.argmax(1) == answer).sum())
    return 100 * right / len(queries)


def linear(bank: Tensor, labels: Tensor, queries: Tensor, truth: Tensor) -> float:
    """Logistic regression on standardised features, L-BFGS."""
    mean, std = bank.mean(0), bank.std(0) + 1e-6
    bank, queries = (bank - mean) / std, (queries - mean) / std
    layer = nn.Linear(bank.shape[1], int(labels.max()) + 1, device=bank.device)
    optimiser = torch.optim.LBFGS(layer.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(layer(bank), labels) + 1e-4 * layer.weight.square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)  # type: ignore[arg-type]
    return 100 * float((layer(queries).argmax(1) == truth).float().mean())


def prototypes(bank: Tensor, labels: Tensor, queries: Tensor, truth: Tensor, shots: int = 4, seeds: int = 10) -> float:
    """Nearest class mean of `shots` labeled images per class, mean over seeds."""
    accuracies = []
    for seed in range(seeds):
        order = torch.randperm(len(bank), generator=torch.Generator().manual_seed(seed)).to(bank.device)
        means = [bank[order[labels[order] == c][:shots]].mean(0) for c in range(int(labels.max()) + 1)]
        nearest = (queries @ F.normalize(torch.stack(means), dim=1).T).argmax(1)
        accuracies.append(100 * float((nearest == truth).float().mean()))
    return sum(accuracies) / seeds


def measure(
    vit: VisionTransformer, sets: dict[str, tuple[Part, Part]], statistics: Statistics, device: torch.device
) -> dict[str, float]:
    """k-NN, linear-probe and 4-label prototype accuracy (%) on every set of (train, test)."""
    figures: dict[str, float] = {}
    for name, ((bank, labels), (queries, truth)) in sets.items():
        bank, queries = (features_of(vit, images, statistics, device) for images in (bank, queries))
        labels, truth = labels.to(device), truth.to(device)
        figures[f"{name}_knn"] = knn(bank, labels, queries, truth)
        figures[f"{name}_linear"] = linear(bank, labels, queries, truth)
        figures[f"{name}_prototypes_4"] = prototypes(bank, labels, queries, truth)
    return {key: round(value, 2) for key, value in figures.items()}
