"""Weights that an update left as they were: rounded away rightly, or not updated at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from andon_contracts.agree import Observation, bits_of
from andon_contracts.laws.law import Judgement, Seen
from andon_contracts.laws.loop import AFTER
from andon_contracts.watch.motion import Motion, Unmoved
from tests.watch.packed import packed

Make = Callable[[Sequence[nn.Parameter], float], torch.optim.Optimizer]


class Lars(torch.optim.Optimizer):
    """An optimizer that torch does not have: matrices move by a thousandth of their norm, times the rate."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad + 1e-6 * p
                if p.dim() > 1:
                    update = update * (1e-3 * p.norm() / update.norm())
                held = self.state[p].setdefault("mu", torch.zeros_like(p))
                held.mul_(0.9).add_(update)
                p.sub_(held, alpha=group["lr"])


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "SGD, decay": lambda p, lr: torch.optim.SGD(p, lr=lr, weight_decay=1e-4),
    "SGD, momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "SGD, Nesterov, decay": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "SGD, upwards": lambda p, lr: torch.optim.SGD(p, lr=lr, maximize=True, weight_decay=1e-4),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr=lr, weight_decay=1e-2),
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr=lr),
    "AdamW, rate in a tensor": lambda p, lr: torch.optim.AdamW(p, lr=torch.tensor(lr), foreach=False),
    "AdamW, AMSGrad, fused": lambda p, lr: torch.optim.AdamW(p, lr=lr, amsgrad=True, fused=True),
    "NAdam": lambda p, lr: torch.optim.NAdam(p, lr=lr),
    "RAdam": lambda p, lr: torch.optim.RAdam(p, lr=lr),
    "Adamax": lambda p, lr: torch.optim.Adamax(p, lr=lr),
    "Adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr),
    "RMSprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.9, centered=True),
    "Adadelta": lambda p, lr: torch.optim.Adadelta(p, lr=lr),
    "Adafactor": lambda p, lr: torch.optim.Adafactor(p, lr=lr),
    "LARS": Lars,
}
KNOWN = [name for name in OPTIMIZERS if name.startswith(("SGD", "Adam", "AdamW")) and name != "Adamax"]


def parameters() -> list[nn.Parameter]:
    """The weights of a norm, all 1.0, those of a matrix, and a norm that starts at 0."""
    drawn = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) / 4
    return [nn.Parameter(torch.ones(16)), nn.Parameter(drawn), nn.Parameter(torch.zeros(16))]


def unmoved(make: Make, rate: float, sizes: Sequence[float], lost: int | None = None) -> list[list[int]]:
    """The members that are reported in each of eight updates with gradients of these sizes, of which `lost` is undone.

    Every fourth update has a rate of a ten-thousandth, as a warm-up or the end of a schedule has.
    """
    members = parameters()
    optimizer = make(members, rate)
    motion, generator = Motion(optimizer, members), torch.Generator().manual_seed(1)
    found = []
    for window in range(1, 9):
        for p, size in zip(members, sizes, strict=True):
            p.grad = torch.randn(p.shape, generator=generator) * size
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 if window % 4 else 1e-4)
        kept = members[0].detach().clone() if lost is None else members[lost].detach().clone()
        motion.remember(window)
        optimizer.step()
        if lost is not None:
            with torch.no_grad():
                members[lost].copy_(kept)
        found.append([each.member for each in motion.unmoved()])
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_is_rounded_away_is_right(name: str) -> None:
    """Whatever the optimizer, its rate and the sizes of gradients: what it does by itself is never reported."""
    for rate in (1e-12, 1e-10, 4e-8, 1e-6, 1e-4, 1e-2):
        for sizes in ((1.0, 1.0, 1.0), (1e-3, 1.0, 1e-2), (1e-6, 1e-2, 1e-4), (1e-4, 1e-8, 1e-4)):
            assert not any(unmoved(OPTIMIZERS[name], rate, sizes)), (rate, sizes)


@pytest.mark.parametrize("lost", range(3))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_weight_that_is_not_updated_is_found(name: str, lost: int) -> None:
    assert unmoved(OPTIMIZERS[name], 1e-2, (1.0, 1.0, 1.0), lost)[0] == [lost]


@pytest.mark.parametrize("name", KNOWN)
def test_an_update_of_known_arithmetic_is_held_to_the_spacing_of_its_weights(name: str) -> None:
    """A norm of gradients of 1e-3, whose weights of 1.0 are 1.2e-7 apart: found where the rate moves it by more."""
    assert unmoved(OPTIMIZERS[name], 1e-2, (1e-3, 1.0, 1.0), 0)[0] == [0]
    assert not any(unmoved(OPTIMIZERS[name], 4e-9, (1e-3, 1.0, 1.0), 0))


def test_a_line_search_that_finds_no_better_place_is_right() -> None:
    """LBFGS stays where it is, though its gradient is not zero, once a step gains next to nothing."""
    weight = nn.Parameter(torch.linspace(1e-4, 1e-3, 16))
    optimizer = torch.optim.LBFGS([weight], lr=1.0)
    motion = Motion(optimizer, [weight])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 1e-6 * weight.sum()
        loss.backward()
        return loss

    before = weight.detach().clone()
    closure()
    motion.remember(1)
    optimizer.step(closure)
    assert torch.equal(weight, before)
    assert motion.unmoved() == []


def test_what_16_bits_lose_is_found_and_what_float32_would_lose_too_is_not() -> None:
    """A step of 1e-4 from weights of 1.0, of which bfloat16 has none nearer than 0.0078; and one of 1e-9."""
    for rate, expected in ((1e-4, [Unmoved(0, pytest.approx(1e-4, rel=0.01), 2.0**-7)]), (1e-9, [])):
        weight = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([weight], lr=rate)
        motion = Motion(optimizer, [weight])
        weight.grad = torch.ones_like(weight)
        motion.remember(1)
        optimizer.step()
        assert motion.unmoved() == expected


@pytest.mark.parametrize(
    ("due", "seen", "likely"),
    [
        (1e-4, "0.0078 apart there, so that the update is rounded away", "the precision is too low"),
        (0.5, "0.0078 apart there", "the optimizer holds other parameters than the model"),
    ],
)
def test_the_message_says_which_of_both_causes_it_is(due: float, seen: str, likely: str) -> None:
    values = {"unmoved": 1, "unmoved due": bits_of(due), "unmoved spacing": bits_of(2.0**-7)}
    law = next(each for each in AFTER if each.clause == "update-applied")
    found = Judgement((law,), Seen((Observation(0, 3, 9, "here", values),), None, ("head",))).violation(law).finding
    kept = f"head kept every bit, although its gradient and learning rate call for an update of about {due:.2g};"
    assert kept in found.seen
    assert found.seen.endswith(seen)
    assert found.likely.startswith(likely)


class _Idle(torch.optim.SGD):
    """Leaves all weights as they are."""

    def step(self, closure: Any = None) -> None:
        """No update."""


def _full(value: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.full((16,), value))
    parameter.grad = torch.ones(16)
    return parameter


def test_a_state_that_is_no_table_says_nothing() -> None:
    """An optimizer may keep whatever it likes for a parameter; that it moved nothing is seen all the same."""
    optimizer = _Idle([weight := _full(1.0)])
    optimizer.state[weight] = [torch.ones(16)]
    motion = Motion(optimizer, [weight])
    motion.remember(1)
    assert [each.member for each in motion.unmoved()] == [0]


def test_a_weight_that_the_loop_takes_out_of_its_optimizer_is_not_looked_at() -> None:
    """Before an update, or in one: the other is."""
    first, second = _full(1.0), _full(1.0)
    optimizer = _Idle([first, second])
    motion = Motion(optimizer, [first, second])
    motion.remember(1)
    optimizer.param_groups[0]["params"] = [first]
    assert [each.member for each in motion.unmoved()] == [0]
    motion.remember(2)
    assert [each.member for each in motion.unmoved()] == [0]


def test_a_weight_whose_elements_are_not_stored_one_by_one_is_not_looked_at() -> None:
    """A quantized weight that is trained: its parts may stay as they are while rounding takes small updates away."""
    weight = nn.Parameter(packed(4, 4))
    weight.grad = torch.ones(4, 4)
    motion = Motion(torch.optim.SGD([weight], lr=1.0), [weight])
    motion.remember(1)
    assert motion.unmoved() == []
