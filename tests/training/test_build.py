"""What is put together below the configuration, and that nothing else puts a trainer together."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import andon
import andon_falsify
from andon.backend.inprocess import InlineBackend
from andon.model.adapter import AdapterSpec, trainable_parameters
from andon.step.optimizer import OptimizerSpec
from andon.training.build import StepSpec, build_model, build_replicas
from tests.model.tiny import CPU, spec, task

ROWS = task([[1, 2, 3], [4, 5]], [0, 1])
UPDATE = StepSpec(OptimizerSpec(), seed=5, micro_batches=2, clip_norm=1.0)


@pytest.mark.parametrize("own_base", [False, True])
def test_replicas_on_one_device_share_what_is_frozen_or_have_their_own(own_base: bool) -> None:
    """Equal bits either way; what trains is always each replica's own."""
    model = build_model(spec("decoder"), AdapterSpec(r=2, alpha=4.0), 3)
    first, second = build_replicas(model, UPDATE, InlineBackend([CPU, CPU]), ROWS, 0, own_base=own_base)
    assert (first.weights_digest(), first.base_digest()) == (second.weights_digest(), second.base_digest())
    trained, others = trainable_parameters(first.model), dict(second.model.named_parameters())
    shared = {
        name: parameter.data_ptr() == others[name].data_ptr() for name, parameter in first.model.named_parameters()
    }
    assert {shared[name] for name in trained} == {False}
    assert {same for name, same in shared.items() if name not in trained} == {not own_base}


def test_one_place_puts_steps_and_replicas_together() -> None:
    """The trainer that ships, the coordinator and the accused are the builder's: nobody else makes a step of one.

    A fault may, as something that is wrong.
    """
    makers = set()
    for package in (andon, andon_falsify):
        top = Path(str(package.__file__)).parent
        for path in top.rglob("*.py"):
            calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
            if {"TrainingStep", "Replica"} & {call.func.id for call in calls if isinstance(call.func, ast.Name)}:
                makers.add(f"{package.__name__}/{path.relative_to(top).as_posix()}")
    assert makers == {"andon/training/build.py", "andon_falsify/faults/own_promises.py"}
