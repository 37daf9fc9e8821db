"""Random numbers that depend on (seed, step, micro-batch) alone, and models whose numbers do not."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from andon.backend.base import InlineBackend
from andon.config.schema import Config
from andon.console.messages import InputError
from andon.step.micro_batch import LeafLoss, key, keyed_randomness, refuse_unkeyed
from andon.training.build import build_replicas
from tests.model.tiny import adapted, task
from tests.support.toy import CPU, Settings, ToyTask, build, rate

Draw = Callable[[], torch.Tensor]


def dropout() -> torch.Tensor:
    """Masks as `nn.Dropout` draws them, twice, so that a stream and not a single draw is compared."""
    layer = nn.Dropout(0.5)
    return torch.cat([layer(torch.ones(200)), layer(torch.ones(200))])


def attention() -> torch.Tensor:
    """Attention with dropout: uniform weights, so that what is dropped shows."""
    q = torch.zeros(1, 2, 12, 4)
    v = torch.arange(96.0).view(1, 2, 12, 4)
    return F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)


def noise() -> torch.Tensor:
    drawn = torch.ops.aten.bernoulli(torch.full((20,), 0.5))
    return torch.cat([torch.randn(20), torch.rand_like(drawn), torch.randint(3, 90, (20,)).float(), drawn])


DRAWS = [dropout, attention, noise]


def keyed(draw: Draw, *, step: int = 4, index: int = 2, device: torch.device = CPU) -> torch.Tensor:
    with keyed_randomness(9, step, index, device):
        return draw()


@pytest.mark.parametrize("draw", DRAWS)
def test_the_key_alone_decides(draw: Draw) -> None:
    """Not what the process drew before."""
    drawn = {tuple(keyed(draw, step=step, index=index).flatten().tolist()) for step in (4, 5) for index in (2, 3)}
    assert len(drawn) == 4
    first = keyed(draw)
    draw()
    assert torch.equal(keyed(draw), first)


@pytest.mark.parametrize("x", [torch.ones(3, 7), torch.ones(40, 25, dtype=torch.bfloat16).t()], ids=["fp32", "bf16"])
def test_masks_are_those_that_every_run_so_far_was_trained_with(x: torch.Tensor) -> None:
    """One draw an element, in the order of memory, from a generator that starts at the key."""
    kept = torch.empty_like(x).bernoulli_(0.7, generator=torch.Generator().manual_seed(key(9, 4, 2)))
    assert torch.equal(keyed(lambda: F.dropout(x, 0.3)), x * kept.div_(0.7))


def test_a_training_step_leaves_the_callers_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    step, _ = build(InlineBackend([CPU] * 2), Settings(4, sizes=(8,)), ToyTask())
    step(Settings(4, sizes=(8,)).batches()[0], rate(1), 1)
    with pytest.raises(KeyError), keyed_randomness(9, 4, 2, CPU):
        raise KeyError(torch.rand(()))
    assert torch.equal(torch.get_rng_state(), before)


class StandIn:
    """In the place of a GPU's generators: none is there."""

    def __getitem__(self, _: int) -> torch.Generator:
        return torch.Generator()


@pytest.mark.parametrize("before", [0, 5])
def test_what_a_gpus_model_draws_on_the_cpu_is_keyed_too(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    """Which layers OPT leaves out must not depend on what the process drew before; and that stream is left alone."""
    monkeypatch.setattr(torch.cuda, "default_generators", StandIn())
    torch.manual_seed(1)
    torch.rand(before)
    state = torch.get_rng_state()
    drawn = keyed(lambda: torch.rand([]), device=torch.device("cuda", 0))
    assert torch.equal(drawn, torch.rand([], generator=torch.Generator().manual_seed(key(9, 4, 2))))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_draws_what_it_drew(reentrant: bool) -> None:
    """Two regions with a draw between them; the backward pass leaves the random stream where it was."""

    def gradient(*, again: bool) -> torch.Tensor:
        x = torch.linspace(0.1, 1.0, 64, requires_grad=True)

        def region(v: torch.Tensor) -> torch.Tensor:
            return torch.tanh(F.dropout(v, 0.5)) * (v * (torch.rand_like(v) + 0.5))

        with keyed_randomness(9, 4, 2, CPU):
            for _ in range(2):
                y = checkpoint(region, x, use_reentrant=reentrant) if again else region(x)
                F.dropout(y, 0.3).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(again=True), gradient(again=False))


def test_keys_are_apart() -> None:
    keys = {key(seed, step, index) for seed in range(6) for step in range(6) for index in range(6)}
    assert len(keys) == 216
    assert all(0 <= value < 1 << 63 for value in keys)


OWN, OWN_OF_NUMPY = torch.Generator().manual_seed(1), np.random.default_rng(1)
UNKEYED: dict[str, Callable[[], float]] = {
    "numpy": np.random.random,
    "random": random.random,
    "its own generator": lambda: torch.rand((), generator=OWN).item(),
    "its own of numpy": OWN_OF_NUMPY.random,
    "random, and seldom to effect": lambda: 0.0 if random.random() < 2 else 1.0,
}
KEYED: dict[str, Callable[[], float]] = {
    "nothing": lambda: 0.0,
    "torch": lambda: torch.rand(()).item(),
    "numpy, seeded each time": lambda: np.random.RandomState(3).random(),
    "numpy's global generator, seeded each time": lambda: (np.random.seed(3), np.random.random())[1],
}


@pytest.mark.parametrize("draw", UNKEYED.values(), ids=UNKEYED)
def test_a_model_whose_numbers_no_key_decides_is_refused(
    draw: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = task([[1, 2, 3], [4, 5]], [0, 1])
    plain = rows.loss_sum
    monkeypatch.setattr(rows, "loss_sum", lambda *given: LeafLoss(plain(*given).loss_sum + draw(), torch.tensor(0)))
    model = adapted()
    states = random.getstate(), repr(np.random.get_state())
    with pytest.raises(InputError, match=r"^model\.base: two passes .* differ: the model draws from numpy, random or"):
        build_replicas(model, Config(seed=5), InlineBackend([CPU]), rows, 0)
    assert (random.getstate(), repr(np.random.get_state())) == states


@pytest.mark.parametrize("draw", KEYED.values(), ids=KEYED)
def test_a_model_whose_numbers_its_key_decides_is_not(draw: Callable[[], float]) -> None:
    refuse_unkeyed(lambda: LeafLoss(torch.tensor(draw()), torch.tensor(0)), CPU)
