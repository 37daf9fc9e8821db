"""Randomness keyed by (seed, step, micro-batch), never by rank or process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from andon.step.task import LeafLoss


def key(seed: int, step: int, micro_batch: int) -> int:
    """A 63-bit generator seed for one micro-batch of one step; different arguments give unrelated streams."""
    data = f"andon {seed} {step} {micro_batch}".encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1


@contextmanager
def keyed_randomness(seed: int, step: int, micro_batch: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's global generators of the CPU and of `device` start from the key of one micro-batch.

    The state of the CPU's generator is restored on exit. A GPU's is not: only its rank draws from it.
    """
    stream = key(seed, step, micro_batch)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(stream)
        yield


def refuse_unkeyed(forward: Callable[[], LeafLoss], device: torch.device) -> None:
    """Run `forward`, a pass over one row, twice with one key. The states of all generators are as before afterwards.

    Raises `ValueError` if the losses differ, or if the second pass moves the global generator of numpy or `random` on:
    a stream that no key decides would give another result on another rank.
    """
    numbers: Any = np.random
    python_state, numpy_state = random.getstate(), numbers.get_state()
    found = []
    try:
        for _ in range(2):
            with keyed_randomness(0, 0, 0, device):
                loss = forward().loss_sum.detach().double().view(torch.int64).item()
            _, words, *rest = numbers.get_state()
            found.append((loss, random.getstate(), words.tobytes(), rest))
    finally:
        random.setstate(python_state)
        numbers.set_state(numpy_state)
    if found[0] != found[1]:
        msg = (
            "two passes over one row with one seed differ: the model draws from numpy, random or a generator of its "
            "own, or keeps something from pass to pass; use one that draws from torch's global generator alone"
        )
        raise ValueError(msg)
