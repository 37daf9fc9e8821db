"""Deterministic kernels, demanded."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from andon.console.problems import InputError, Problem

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_SETTINGS = (":4096:8", ":16:8")
"""Those with which its results are the same from run to run."""


def demand_determinism(devices: Sequence[torch.device]) -> None:
    """Deterministic kernels on `devices`, or an error at the first operation that has none.

    cuBLAS looks at its workspace's setting when CUDA starts, so this comes before. On GPUs torch is kept from writing
    NaN into memory that a kernel is about to fill, which takes a twentieth of a compiled step: who reads what nobody
    wrote gives other bits in another run, and that is what equal bits from run to run are compared for.

    Raises `InputError` where cuBLAS was told to be otherwise.
    """
    torch.use_deterministic_algorithms(mode=True)
    if all(device.type != "cuda" for device in devices):
        return
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    given = os.environ.setdefault(_CUBLAS, _CUBLAS_SETTINGS[0])
    if given not in _CUBLAS_SETTINGS:
        what = f"{given!r} lets cuBLAS give other bits from run to run; set {' or '.join(_CUBLAS_SETTINGS)}"
        raise InputError([Problem(_CUBLAS, what)])
