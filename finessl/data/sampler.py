"""The images of each step: seeded permutations, as a function of the step only.

There is no state between steps: a run that resumes at step t continues with the same batches, and every process of a
multi-process run can compute the whole global batch.
"""

from __future__ import annotations

import numpy as np

# One random stream per purpose: default_rng([seed, stream, counter]).
LABELED, UNLABELED, VIEWS, SPLIT, INITIAL, DROPOUT, CACHE, AUDIT = range(8)


def generator(seed: int, stream: int, counter: int = 0) -> np.random.Generator:
    return np.random.default_rng([seed, stream, counter])


class Sampler:
    """Batches of `batch` out of `size` items, reshuffled every epoch; no item twice in a batch if size ≥ batch.

    The incomplete batch at the end of an epoch is dropped. A set smaller than the batch is repeated to fill it.
    """

    def __init__(self, size: int, batch: int, seed: int, stream: int) -> None:
        if size < 1 or batch < 1:
            raise ValueError(f"cannot draw batches of {batch} from {size} items")
        self.size, self.batch, self.seed, self.stream = size, batch, seed, stream
        self.batches = max(size // batch, 1)  # in an epoch
        self.epoch, self.order = -1, np.empty(0, np.int64)

    def draw(self, step: int) -> np.ndarray:
        epoch, position = divmod(step, self.batches)
        if epoch != self.epoch:
            rng = generator(self.seed, self.stream, epoch)
            repeats = -(-self.batch // self.size)
            self.order = np.concatenate([rng.permutation(self.size) for _ in range(repeats)])
            self.epoch = epoch
        return self.order[position * self.batch : (position + 1) * self.batch]
