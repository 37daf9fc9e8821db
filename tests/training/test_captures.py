"""When eager passes of a GPU become CUDA graphs: from the configuration, its plan and the GPU's room alone."""

from __future__ import annotations

from dataclasses import fields

import pytest

from andon.config.schema import Config
from andon.model.memory import MemoryPlan
from andon.training.study import captures, with_graphs_that_fit

GIB = 1 << 30
NCCL = {"backend": "nccl"}
ALWAYS = {"backend": "nccl", "cuda_graphs": "always"}


@pytest.mark.parametrize(
    ("settings", "kind", "activations", "expected"),
    [
        ({"run": NCCL}, "cuda", GIB, True),
        ({"run": {"backend": "inline"}}, "cuda", GIB, True),
        ({"run": {"backend": "threads"}}, "cuda", GIB, False),
        ({"run": {"backend": "mixed"}}, "cuda", GIB, False),
        ({"run": {"backend": "mixed", "cuda_graphs": "always"}}, "cuda", GIB, False),
        ({"run": NCCL}, "cuda", 2 * GIB, True),
        ({"run": NCCL}, "cuda", 2 * GIB + 1, False),
        ({"run": NCCL}, "cuda", None, False),
        ({"run": NCCL}, "cpu", GIB, False),
        ({"run": NCCL, "task": "sft"}, "cuda", GIB, False),
        ({"run": ALWAYS, "task": "sft"}, "cuda", GIB, True),
        ({"run": ALWAYS}, "cuda", 9 * GIB, True),
        ({"run": ALWAYS}, "cuda", None, True),
        ({"run": {"backend": "nccl", "cuda_graphs": "never"}}, "cuda", GIB, False),
        ({"run": ALWAYS, "training": {"compile": "kernels"}}, "cuda", GIB, False),
        ({"run": ALWAYS, "training": {"activation_checkpointing": True}}, "cuda", GIB, False),
    ],
)
def test_small_eager_passes_are_captured(
    settings: dict[str, object], kind: str, activations: int | None, expected: bool
) -> None:
    """By themselves up to 2 GiB a micro-batch, by word any; never what is compiled or checkpointed, nor beside a CPU or
    on threads, which share a generator."""
    assert captures(Config.model_validate(settings), kind, activations) is expected


@pytest.mark.parametrize(("asked", "free", "kept"), [("auto", 15, 5), ("auto", 14, 0), ("always", 14, 5)])
def test_graphs_are_left_out_where_there_is_no_room(asked: str, free: int, kept: int) -> None:
    """Ten bytes lasting and five of graphs: nobody is refused for what he did not ask for."""
    plan = MemoryPlan(**dict.fromkeys((each.name for each in fields(MemoryPlan)), 0) | {"base": 10, "graphs": 5})
    config = Config.model_validate({"run": {"backend": "nccl", "cuda_graphs": asked}})
    assert with_graphs_that_fit(plan, config, free).graphs == kept


def test_what_is_compiled_keeps_its_graphs_in_the_plan() -> None:
    plan = MemoryPlan(**dict.fromkeys((each.name for each in fields(MemoryPlan)), 0) | {"base": 10, "graphs": 5})
    config = Config.model_validate({"run": NCCL, "training": {"compile": "graphs"}})
    assert with_graphs_that_fit(plan, config, 14) == plan
