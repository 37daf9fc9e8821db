"""The interpreter of whoever calls `andon.train`: a run, or its model, that works in it leaves it as it was."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def torch_as_found(*, threads: int | None = 1) -> Iterator[None]:
    """Inside, torch has the settings of a new rank; afterwards it has its caller's again.

    threads: of one operation on a CPU, None: as many as the caller has.

    These are the number of threads, deterministic kernels, the types and devices of new tensors, and whether gradients
    are recorded or numbers cast. So are the states of the generators of torch, numpy and Python, whose next numbers do
    not depend on a run in between, and the variables of the environment.
    """
    with ExitStack() as stack:
        stack.callback(_put_back, dict(os.environ))
        _settings(stack, threads)
        _generators(stack)
        stack.enter_context(torch.inference_mode(mode=False))  # gradients are recorded, too
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _put_back(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _settings(stack: ExitStack, threads: int | None) -> None:
    filling: Any = torch.utils.deterministic
    stack.callback(setattr, filling, "fill_uninitialized_memory", filling.fill_uninitialized_memory)
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(threads or torch.get_num_threads())
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    stack.callback(
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warn_only
    )
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float32)
    if torch.get_default_device().type != "cpu":  # the context costs something at each call
        stack.enter_context(torch.device("cpu"))


def _generators(stack: ExitStack) -> None:
    stack.callback(random.setstate, random.getstate())
    stack.callback(torch.set_rng_state, torch.get_rng_state())
    if torch.cuda.is_initialized():
        stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        stack.callback(numpy.random.set_state, numpy.random.get_state())
