"""The whole classifier as one module, from pixels to probabilities: what an ONNX or pt2 file holds."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from finessl.inference.classifier import Classifier
from finessl.models.encoder import Encoder
from finessl.models.network import Network
from finessl.models.tuning import create
from finessl.models.tuning.base import Tuning
from finessl.models.vit import ViTEncoder

INPUT = "images"
OUTPUTS = ("probabilities", "logits", "embedding")
EXAMPLE_BATCH = 2  # torch.export takes a dimension of size 1 for a constant
MAX_BATCH = 1024


class ClassifierGraph(nn.Module):
    """uint8 images [n, S, S, 3] → probabilities [n, C], logits [n, C], embedding [n, dim].

    Normalisation, encoder with its tuning, head, temperature and softmax are inside; decoding and resizing are not.
    Tuning that is a change of weights is merged, the rest becomes constants of the graph.
    """

    scale: Tensor  # of pixels
    shift: Tensor

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        network = merged(classifier)
        self.encoder, self.head = network.encoder, network.head
        mean, std = (torch.tensor(classifier.description[name], dtype=torch.float64) for name in ("mean", "std"))
        self.register_buffer("scale", (1 / (255 * std)).float().view(-1, 1, 1))
        self.register_buffer("shift", (-mean / std).float().view(-1, 1, 1))
        self.temperature = classifier.temperature
        self.requires_grad_(False).eval()

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embedding = self.encoder(images.permute(0, 3, 1, 2).float() * self.scale + self.shift)
        logits = self.head(embedding)
        return (logits / self.temperature).softmax(1), logits, embedding


def tuning_of(classifier: Classifier) -> Tuning:
    options = dict(classifier.description["tuning"])
    return create(options.pop("name"), options)


def merged(classifier: Classifier) -> Network:
    """A copy of the network whose tuning is folded into the plain weights where it can be."""
    network, tuning = copy.deepcopy(classifier.network), tuning_of(classifier)
    encoder: Encoder = network.encoder
    if tuning.mergeable and isinstance(encoder, ViTEncoder):
        tuning.merge(encoder)
    return network


def trace(graph: ClassifierGraph, size: int) -> torch.export.ExportedProgram:
    """The graph for any batch from 1 to MAX_BATCH."""
    example = torch.zeros((EXAMPLE_BATCH, size, size, 3), dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    with torch.no_grad():
        return torch.export.export(graph, (example,), dynamic_shapes={INPUT: {0: batch}})
