"""When eager passes of a GPU become CUDA graphs: from the configuration and its plan alone."""

from __future__ import annotations

import pytest

from andon.config.schema import Config
from andon.training.study import captures

GIB = 1 << 30


@pytest.mark.parametrize(
    ("settings", "kind", "activations", "expected"),
    [
        ({}, "cuda", GIB, True),
        ({}, "cuda", 2 * GIB, True),
        ({}, "cuda", 2 * GIB + 1, False),
        ({}, "cuda", None, False),
        ({}, "cpu", GIB, False),
        ({"run": {"cuda_graphs": "always"}}, "cuda", 9 * GIB, True),
        ({"run": {"cuda_graphs": "always"}}, "cuda", None, True),
        ({"run": {"cuda_graphs": "never"}}, "cuda", GIB, False),
        ({"run": {"cuda_graphs": "always"}, "training": {"compile": "kernels"}}, "cuda", GIB, False),
        ({"run": {"cuda_graphs": "always"}, "training": {"activation_checkpointing": True}}, "cuda", GIB, False),
    ],
)
def test_small_eager_passes_are_captured(
    settings: dict[str, object], kind: str, activations: int | None, expected: bool
) -> None:
    """By themselves up to 2 GiB a micro-batch, by word any; never what is compiled, checkpointed, or on a CPU."""
    assert captures(Config.model_validate(settings), kind, activations) is expected
