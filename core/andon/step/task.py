"""The step's interface to a task: rows to tensors, tensors to a loss sum. Works with any module and any loss.

The randomness of a pass is keyed by (seed, step, micro-batch), never by rank or process.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LeafLoss:
    """The loss of one micro-batch.

    loss_sum: scalar with its graph, the SUM over its rows (weighted, not averaged). correct: scalar int64, the
    correctly predicted terms. terms: scalar int64, the number of terms in the sum; None: one per row.
    """

    loss_sum: torch.Tensor
    correct: torch.Tensor
    terms: torch.Tensor | None = None


class Task(Protocol):
    """Rows and their loss. The global batch's gradient is d(sum of loss sums) / d(weights) / terms of the batch."""

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        """The collated rows `ids` (at least one) on `device`; the first dimension of every tensor is the rows."""
        ...

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss: ...

    def content(self, batch: Batch) -> torch.Tensor:
        """int64 [rows]: a digest of each row as the model receives it, without padding."""
        ...

    def planned_content(self, ids: Sequence[int]) -> torch.Tensor:
        """int64 [rows]: the digests that `content` must return for these rows."""
        ...

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        """The number of terms that each of these rows adds to the loss sum: 1 if a row is one term."""
        ...


def key(seed: int, step: int, micro_batch: int) -> int:
    """A 63-bit generator seed for one micro-batch of one step; different arguments give unrelated streams."""
    data = f"andon {seed} {step} {micro_batch}".encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1


@contextmanager
def keyed_randomness(seed: int, step: int, micro_batch: int, device: torch.device) -> Iterator[None]:
    """Context manager: seed torch's global generators of the CPU and of `device` with a micro-batch's key."""
    stream = key(seed, step, micro_batch)
    # A GPU's generator is not restored: only its rank draws from it.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(stream)
        yield


def refuse_unkeyed(forward: Callable[[], LeafLoss], device: torch.device) -> None:
    """Run `forward`, a pass over one row, twice with one key, and restore the host's generators.

    Raises `ValueError` if the losses differ, or if the second pass advances the global generator of numpy or `random`:
    these are not keyed, so ranks would get different results.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    passes = []
    try:
        for _ in range(2):
            with keyed_randomness(0, 0, 0, device):
                loss = forward().loss_sum.detach().double().view(torch.int64).item()
            passes.append((loss, random.getstate(), pickle.dumps(np.random.get_state(legacy=False))))
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    if passes[0] != passes[1]:
        msg = (
            "two passes over one row with one seed differ: the model draws from numpy, random or a generator of its "
            "own, or keeps something from pass to pass; use one that draws from torch's global generator alone"
        )
        raise ValueError(msg)
