"""Layers that compute their activations again: the same bits on any number of workers, and less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from andon.backend.base import Backend, InlineBackend
from andon.config.schema import Adapter, Config, Optimizer, Training
from andon.console.messages import InputError
from andon.model.adapter import attach
from andon.model.build import checkpoint_layers
from andon.model.masks import using_own_attention
from andon.step.plan import BatchPlan
from andon.step.step import TrainingStep
from andon.training.build import build_replicas
from tests.model.tiny import CPU, base_of, causal, changed, spec, task

ROWS = task(
    [[1 + (row * 7 + place) % 30 for place in range(3 + row % 9)] for row in range(13)], [r % 3 for r in range(13)]
)
PLAN = BatchPlan(tuple(range(13)), 8, 5, 3, 1)  # eight rows in five micro-batches, then the five that are left


def trained(backend: Backend, optimizer: Any, *, checkpointing: bool, dropout: float, architecture: str) -> int:
    shape = changed(spec(architecture), dropout=dropout)
    model = attach(base_of(shape), Adapter(r=2, alpha=4.0, dropout=dropout), 3)
    settings, clip = Optimizer(name=optimizer, weight_decay=0.0), 1.0 if optimizer == "adamw" else None
    config = Config(seed=5, optimizer=settings, training=Training(activation_checkpointing=checkpointing))
    replicas = build_replicas(model, config, backend, ROWS, 0)
    step = TrainingStep(backend, replicas, ROWS, 5, clip)
    step.attest_start({})
    for number in range(1, PLAN.total_steps + 1):
        step.launch(PLAN.batch(number), 0.1, number).result()
    backend.close()
    return replicas[0].weights_digest()


@pytest.mark.parametrize(("architecture", "optimizer"), [("decoder", "sgd"), ("encoder", "adamw")])
def test_the_bits_are_those_without_it_on_any_number_of_workers(architecture: str, optimizer: str) -> None:
    """Without dropout the digest is another one, so what is compared depends on the draws."""

    def digest(backend: Backend, *, checkpointing: bool, dropout: float = 0.25) -> int:
        return trained(backend, optimizer, checkpointing=checkpointing, dropout=dropout, architecture=architecture)

    plain = digest(InlineBackend([CPU]), checkpointing=False)
    assert digest(InlineBackend([CPU] * 3), checkpointing=True) == plain
    assert digest(InlineBackend([CPU]), checkpointing=True, dropout=0.0) != plain


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(InputError, match=r"^training\.activation_checkpointing: Linear has no layers"):
        checkpoint_layers(nn.Linear(2, 2))


def test_what_is_computed_again_attends_as_it_did() -> None:
    """The pass's own attention is gone when its gradient is made: the same one is called again, once a layer."""
    calls: list[str] = []

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> Any:
        calls.append(type(module).__name__)
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        return (query * key * value).transpose(1, 2).contiguous(), None

    found = []
    for checkpointing in (False, True):
        model = causal(adapter=Adapter(kind="none"))
        if checkpointing:
            checkpoint_layers(model)
        calls.clear()
        with using_own_attention(model, "andon_test_attention", attend):
            logits = model(input_ids=torch.arange(1, 9)[None], use_cache=False).logits
        forward = len(calls)
        logits.square().sum().backward()
        assert (forward, len(calls)) == (2, 4 if checkpointing else 2)
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
