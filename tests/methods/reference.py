"""The methods once more, in NumPy, one image at a time, straight from the formulas; nothing here imports finessl.

Each class takes the task and options by name; `step(t, ...)` returns loss, pseudo-labels and weights of step t and
leaves its state in attributes. Strong logits come as [V, m, C].
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def entropy_to(q, z):
    """−Σ q log softmax(z) for one image; q a class id or a vector."""
    p = softmax(z)
    if np.ndim(q) == 0:
        return -math.log(p[int(q)])
    return -sum(q[k] * math.log(p[k]) for k in range(len(z)) if q[k])


def margin_entropy_to(q, z, margin):
    """Eq. 3 as it is written; a soft target is a mixture of classes."""
    if np.ndim(q) == 1:
        return sum(q[k] * margin_entropy_to(k, z, margin) for k in range(len(z)))
    y = int(q)
    others = sum(math.exp(z[k] + margin[y]) for k in range(len(z)) if k != y)
    return -math.log(math.exp(z[y]) / (math.exp(z[y]) + others))


class Reference:
    def __init__(self, classes, unlabeled, steps, epoch_steps, labeled, **options):
        self.C, self.M, self.T, self.E, self.N = classes, unlabeled, steps, epoch_steps, labeled
        self.o = options
        self.setup()

    def setup(self):
        pass

    def labeled_loss(self, x, y):
        return float(np.mean([entropy_to(y[i], x[i]) for i in range(len(x))]))

    def consistency(self, s, labels, weights):
        return float(np.mean([[weights[j] * entropy_to(labels[j], v[j]) for j in range(len(labels))] for v in s]))


class Supervised(Reference):
    def step(self, t, x, y, **_):
        return self.labeled_loss(x, y), None, None


class PseudoLabel(Reference):
    def step(self, t, x, y, w, **_):
        tau, rho, lam = self.o["threshold"], self.o["warmup"], self.o["unlabeled_weight"]
        p = [softmax(z) for z in w]
        labels = [int(np.argmax(q)) for q in p]
        mask = [1.0 if max(q) >= tau else 0.0 for q in p]
        ramp = min(1.0, t / (rho * self.T)) if rho else 1.0
        return self.labeled_loss(x, y) + lam * ramp * self.consistency([w], labels, mask), labels, mask


class FixMatch(Reference):
    def step(self, t, x, y, w, s, **_):
        p = [softmax(z) for z in w]
        labels = [int(np.argmax(q)) for q in p]
        mask = [1.0 if max(q) >= self.o["threshold"] else 0.0 for q in p]
        return self.labeled_loss(x, y) + self.o["unlabeled_weight"] * self.consistency(s, labels, mask), labels, mask


class FlexMatch(Reference):
    def setup(self):
        self.selected = {}

    def step(self, t, x, y, w, s, index, **_):
        tau = self.o["threshold"]
        counts = Counter(self.selected.values())
        rivals = list(counts.values()) + ([self.M - len(self.selected)] if self.o["warmup"] else [])
        top = max(rivals, default=0) or 1
        labels, mask = [], []
        for z in w:
            p = softmax(z)
            k = int(np.argmax(p))
            a = counts[k] / top
            labels.append(k)
            mask.append(1.0 if p[k] >= tau * a / (2 - a) else 0.0)
        for i, z, k in zip(index, w, labels, strict=True):
            if max(softmax(z)) >= tau:
                self.selected[int(i)] = k
        return self.labeled_loss(x, y) + self.o["unlabeled_weight"] * self.consistency(s, labels, mask), labels, mask


class FreeMatch(Reference):
    def setup(self):
        self.tau = 1 / self.C
        self.p = np.full(self.C, 1 / self.C)
        self.h = np.full(self.C, 1 / self.C)

    def step(self, t, x, y, w, s, **_):
        m = self.o["momentum"]
        probabilities = np.array([softmax(z) for z in w])
        labels = [int(np.argmax(q)) for q in probabilities]
        self.tau = m * self.tau + (1 - m) * np.mean([max(q) for q in probabilities])
        self.p = m * self.p + (1 - m) * probabilities.mean(0)
        self.h = m * self.h + (1 - m) * np.bincount(labels, minlength=self.C) / len(labels)
        mask = [
            1.0 if max(q) >= self.tau * self.p[k] / max(self.p) else 0.0
            for q, k in zip(probabilities, labels, strict=True)
        ]
        fairness = 0.0
        kept = [softmax(v[j]) for v in s for j in range(len(mask)) if mask[j]]
        if kept:
            mean = np.mean(kept, 0)
            histogram = np.bincount([int(np.argmax(q)) for q in kept], minlength=self.C) / len(kept)
            a = np.array([self.p[k] / self.h[k] if self.h[k] else 0.0 for k in range(self.C)])
            b = np.array([mean[k] / histogram[k] if histogram[k] else 0.0 for k in range(self.C)])
            a, b = a / a.sum(), b / b.sum()
            fairness = sum(a[k] * math.log(b[k] + 1e-12) for k in range(self.C))
        loss = self.labeled_loss(x, y) + self.o["unlabeled_weight"] * self.consistency(s, labels, mask)
        return loss + self.o["entropy_weight"] * fairness, labels, mask


class SoftMatch(Reference):
    def setup(self):
        self.p, self.mu, self.var = None, 1 / self.C, 1.0

    def step(self, t, x, y, w, s, **_):
        m = self.o["momentum"]
        raw = np.array([softmax(z) for z in w])
        labels = [int(np.argmax(q)) for q in raw]
        aligned = raw
        if self.o["align"]:
            self.p = raw.mean(0) if self.p is None else m * self.p + (1 - m) * raw.mean(0)
            aligned = np.array([q * (1 / self.C + 1e-6) / (self.p + 1e-6) for q in raw])
            aligned = np.array([q / q.sum() for q in aligned])
        top = np.array([max(q) for q in aligned])
        self.mu = m * self.mu + (1 - m) * top.mean()
        self.var = m * self.var + (1 - m) * top.var(ddof=1)
        weight = [math.exp(-(min(c - self.mu, 0) ** 2) / (2 * self.var / self.o["n_sigma"] ** 2)) for c in top]
        return (
            self.labeled_loss(x, y) + self.o["unlabeled_weight"] * self.consistency(s, labels, weight),
            labels,
            weight,
        )


class DebiasPL(Reference):
    def setup(self):
        self.q = np.full(self.C, 1 / self.C)

    def step(self, t, x, y, w, s, **_):
        m, tau = self.o["momentum"], self.o["debias"]
        debiased = [softmax(z - tau * np.log(self.q)) for z in w]
        labels = [int(np.argmax(q)) for q in debiased]
        mask = [1.0 if max(q) >= self.o["threshold"] else 0.0 for q in debiased]
        self.q = m * self.q + (1 - m) * np.mean([softmax(z) for z in w], 0)
        shifted = [[z + tau * np.log(self.q) for z in v] for v in s]
        loss = self.labeled_loss(x, y) + self.o["unlabeled_weight"] * self.consistency(shifted, labels, mask)
        return loss, labels, mask


class FineSSL(Reference):
    def setup(self):
        self.selected = {}
        self.queue = [np.full(self.C, 1 / self.C)] * (5 * self.C)

    def count(self, p, index):
        for q, i in zip(p, index, strict=True):
            if max(q) >= self.o["pace_threshold"]:
                self.selected[int(i)] = int(np.argmax(q))
            elif self.o["pace_forget"]:
                self.selected.pop(int(i), None)

    def margins(self):
        sigma = np.bincount(list(self.selected.values()), minlength=self.C) if self.selected else np.zeros(self.C)
        if "bms" in self.o["without"]:
            return np.zeros(self.C)
        if sigma.max() == 0:
            return np.full(self.C, self.o["alpha"] if self.o["pace_empty"] == "one" else 0.0)
        beta = sigma / sigma.max()
        delta = (1 - beta) / (1 + beta) if self.o["margin_shape"] == "ratio" else 1 - beta
        spread = 1.0 if "dynamic-alpha" in self.o["without"] else beta.max() - beta.min()
        return self.o["alpha"] * spread * delta

    def step(self, t, x, y, w, s, index, aux_x, aux_w, aux_s, **_):
        o, without = self.o, self.o["without"]
        if o["pace_reset"] == "epoch" and t % self.E == 0:
            self.selected = {}
        p = [softmax(z) for z in w]
        labels = [int(np.argmax(q)) for q in p]
        if o["pace_update"] == "before":
            self.count(p, index)
        margin = self.margins()
        labeled_margin = np.zeros(self.C) if "margin-in-labeled" in without else margin
        loss = np.mean([margin_entropy_to(y[i], x[i], labeled_margin) for i in range(len(x))])
        weight = [max(q) for q in p] if "dls" in without else [max(softmax(z)) for z in aux_w]
        weight = [c if c >= o["min_weight"] else 0.0 for c in weight]
        terms = [weight[j] * margin_entropy_to(labels[j], v[j], margin) for v in s for j in range(len(labels))]
        loss += o["gamma"] * np.mean(terms)
        if "dls" not in without:
            loss += np.mean([entropy_to(y[i], aux_x[i]) for i in range(len(x))])
            lam = 0.0 if "ls" in without else o["smoothing"]
            total, selected = 0.0, 0
            for v in aux_s:
                for j, k in enumerate(labels):
                    if o["aux_threshold"] is not None and max(p[j]) < o["aux_threshold"]:
                        continue
                    low = lam / (self.C - 1) if o["smoothing_form"] == "c-1" else lam / self.C
                    high = 1 - lam if o["smoothing_form"] == "c-1" else 1 - lam + lam / self.C
                    target = np.full(self.C, low)
                    target[k] = high
                    total += margin_entropy_to(target, v[j], margin if o["aux_margin"] else np.zeros(self.C))
                    selected += 1
            divisor = len(aux_s) * len(labels) if o["aux_reduction"] == "all" else max(selected, 1)
            loss += total / divisor
        if o["marginal_entropy"]:
            self.queue = (self.queue + p)[-5 * self.C :]
            mean = np.mean(self.queue, 0)
            loss += o["marginal_entropy"] * np.sum(mean * np.log(mean))
        if o["pace_update"] == "after":
            self.count(p, index)
        return float(loss), labels, weight


def greedy_leaderboard(probabilities, shots):
    """All (image, class) pairs from the most probable down: the image takes the class if both are free."""
    images, classes = probabilities.shape
    pairs = sorted((-probabilities[i, k], i, k) for i in range(images) for k in range(classes))
    place, room = [-1] * images, [shots] * classes
    for _, i, k in pairs:
        if place[i] < 0 and room[k]:
            place[i] = k
            room[k] -= 1
    return place


class SelfTraining(Reference):
    """The step's loss only; pseudo-labels by `greedy_leaderboard`."""

    def setup(self):
        self.pseudo, self.b = [-1] * self.M, 1.0

    def refresh(self, probabilities, shots):
        self.pseudo = greedy_leaderboard(probabilities, shots)
        count = sum(k >= 0 for k in self.pseudo)
        self.b = {"pseudo/labeled": count / self.N, "labeled/pseudo": self.N / count, "none": 1.0}[self.o["balance"]]

    def step(self, t, x, y, w, index, **_):
        labels = [self.pseudo[int(i)] for i in index]
        losses = [entropy_to(k, z) for k, z in zip(labels, w, strict=True) if k >= 0]
        loss = self.b * self.labeled_loss(x, y) + (float(np.mean(losses)) if losses else 0.0)
        return loss, labels, [1.0 if k >= 0 else 0.0 for k in labels]
