"""What ranks must have alike before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from andon.run.provenance import environment
from andon.training.opening import _versions


def session(backend: str, devices: list[str]) -> Any:
    """As much of a session as says where it runs."""
    return SimpleNamespace(backend=SimpleNamespace(name=backend), environment=environment(1, devices))


def test_ranks_of_two_kinds_have_the_rest_alike() -> None:
    """A rank on a GPU has a driver and kernels that one on a CPU has not: in `mixed` that is no fault."""
    assert _versions(session("mixed", ["H200"])) == _versions(session("mixed", []))


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_ranks_of_one_kind_have_everything_alike(backend: str) -> None:
    """There another model of GPU gives other bits."""
    assert _versions(session(backend, ["H200"])) != _versions(session(backend, ["A100"]))
    assert _versions(session(backend, ["H200"])) != _versions(session(backend, []))
