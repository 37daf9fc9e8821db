"""What is printed where ranks differ: fact, inference and scope apart, the minority by rank, and the bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import andon
from andon_contracts.violation import Violation
from andon_contracts.watch.exchange import Element
from andon_contracts.watch.standby import Standby
from tests.support.ranks import run_ranks


class _Row(nn.Module):
    """Its loss is the sum of its parameter, whose gradient is therefore 1 in every element."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 3))

    def forward(self) -> torch.Tensor:
        return self.w.sum()


_UNREAD = "weights and moments agreed after step 1, not read again since"


def _raised(optimizer: Callable[..., torch.optim.Optimizer], folder: str, disturb: Callable[..., None]) -> Violation:
    """What two updates raise, where `disturb` comes between them."""
    model = _Row()
    chosen = optimizer(model.parameters())
    allow = {"hyperparameters-agree": "the test sets them apart"}
    with andon.watch(model, chosen, action="raise", folder=folder, allow=allow):
        try:
            for _step in range(2):
                model().backward()
                chosen.step()
                chosen.zero_grad()
                disturb(model, chosen)
        except Violation as found:
            return found
    raise AssertionError("nothing was raised")


def _sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)  # type: ignore[arg-type]


def _adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.5)  # type: ignore[arg-type]


def _halve_rate(odd: tuple[int, ...]) -> Callable[..., None]:
    def disturb(model: _Row, optimizer: torch.optim.Optimizer) -> None:
        if dist.get_rank() in odd:
            optimizer.param_groups[0]["lr"] = 0.25

    return disturb


def _rate(folder: str, odd: tuple[int, ...]) -> Violation:
    return _raised(_sgd, folder, _halve_rate(odd))


WHO = {
    (2, (1,)): "ranks 0 and 1 differ",
    (3, (2,)): "rank 2 of 3 differs from ranks 0, 1",
    (4, (3,)): "rank 3 of 4 differs from ranks 0, 1, 2",
    (4, (2, 3)): "ranks 0, 1 and ranks 2, 3 differ, with no majority",
}


@pytest.mark.parametrize(("world", "odd"), WHO)
def test_a_rank_with_its_own_rate_is_named(world: int, odd: tuple[int, ...], tmp_path: Path) -> None:
    """Every line of the message. The weights are -0.5 after step 1, and -1 or, at half the rate, -0.75 after step 2."""
    found = [outcome.get() for outcome in run_ranks(world, _rate, str(tmp_path), odd)]
    assert len({str(error) for error in found}) == 1
    few = 2 * len(odd) < world
    bits, rates = {False: "0xbf800000 (-1)", True: "0xbf400000 (-0.75)"}, {False: 0.5, True: 0.25}
    named = odd if few else range(world)

    def by_rank(of: dict[bool, object]) -> str:
        return ", ".join([f"{of[rank in odd]} on rank {rank}" for rank in named] + [f"{of[False]} on the others"] * few)

    assert str(found[0]).splitlines() == [
        f"replicas-agree broken after step 2: {WHO[world, odd]}.",
        f"  where    w (1 of 1 tensors), first at [0, 0]: {by_rank(bits)}",
        f"  before   reduced gradient agreed; {_UNREAD}; lr differs: {by_rank(rates)}",
        "  likely   a rank-local scheduler decision  [inference, not proof]",
        "  state    step 2 was applied; last state known equal: step 1",
        f"  bundle   {tmp_path}/2  explain: andon explain {tmp_path}/2",
        '  silence  andon.watch(..., allow={"replicas-agree": "<reason>"})',
    ]
    assert found[0].bundle == f"{tmp_path}/2"


def _rewritten(folder: str) -> Violation:
    def disturb(model: _Row, optimizer: torch.optim.Optimizer) -> None:
        model.w.detach().add_(0)
        _halve_rate((1,))(model, optimizer)

    return _raised(_sgd, folder, disturb)


def test_weights_are_said_to_agree_before_an_update_where_they_were_read_then(tmp_path: Path) -> None:
    """A write that a version counter shows has them read again; the moments are read after updates only."""
    lines = str(run_ranks(2, _rewritten, str(tmp_path))[0].get()).splitlines()
    said = "  before   weights and reduced gradient agreed; moments agreed after step 1, not read again since; lr "
    assert any(line.startswith(said) for line in lines)


def _own_rate() -> Violation:
    model = _Row()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 + dist.get_rank())
    with andon.watch(model, optimizer, action="raise", allow={"hyperparameters-agree": "a test"}):
        model().backward()
        with pytest.raises(Violation) as found:
            optimizer.step()
    return found.value


def test_nothing_is_said_of_moments_before_the_first_update() -> None:
    """No optimizer state has been read by then; weights are read before a first update."""
    lines = str(run_ranks(2, _own_rate)[0].get()).splitlines()
    assert any(line.startswith("  before   weights and reduced gradient agreed; lr differs: ") for line in lines)


def test_one_rank_is_not_said_to_agree_with_itself() -> None:
    """Neither what was equal before nor when it last was: there is nothing that it could have been equal to."""
    model = _Row()
    optimizer = _sgd(model.parameters())
    with andon.watch(model, optimizer, action="raise"):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        (model() * float("nan")).backward()
        with pytest.raises(Violation) as found:
            optimizer.step()
    lines = str(found.value).splitlines()
    assert "  state    step 2 was not applied" in lines
    assert not any(line.startswith("  before") for line in lines)


def _move_weight(model: _Row, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.w[1, 2] += dist.get_rank() == 1


def _move_moment(model: _Row, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.w]["exp_avg_sq"][0, 1] += dist.get_rank() == 1


def _at_once(folder: str) -> list[Violation]:
    return [_raised(_sgd, folder, _move_weight), _raised(_adam, folder, _move_moment)]


def test_the_element_is_one_of_what_differs(tmp_path: Path) -> None:
    """A weight that was moved before an update shows the weight's bits (-0.5 + 1), not the gradient's; a moment that
    was moved is named by its key."""
    moved = "0x3f000000 (0.5) on rank 1, 0xbf000000 (-0.5) on the others"
    for outcome in run_ranks(3, _at_once, str(tmp_path)):
        weight, moment = outcome.get()
        assert str(weight).splitlines()[:2] == [
            "replicas-agree broken at step 2, before its update: rank 1 of 3 differs from ranks 0, 2.",
            f"  where    w (1 of 1 tensors), first at [1, 2]: {moved}",
        ]
        assert moment.clause == "optimizers-agree"
        assert "  where    w (1 of 1 tensors), exp_avg_sq first at [0, 1]: 0x" in str(moment)


def test_the_command_names_its_own_option() -> None:
    """Under `andon watch` no script has a line that could take `allow=`: the option that silences is `--allow`."""
    model = _Row()
    optimizer = _sgd(model.parameters())
    (model() * float("nan")).backward()
    with Standby({"action": "raise"}), pytest.raises(Violation) as found:
        optimizer.step()
    assert str(found.value).splitlines()[-1] == "  silence  --allow finite=<reason>"


@pytest.mark.parametrize(
    ("value", "dtype", "shown"),
    [
        (1 + 2**-23, torch.float32, "0x3f800001 (1.0000001)"),
        (0.1, torch.float64, "0x3fb999999999999a (0.1)"),
        (1 / 3, torch.bfloat16, "0x3eab (0.334)"),
        (float("-inf"), torch.float16, "0xfc00 (-inf)"),
        (float("nan"), torch.float32, "0x7fc00000 (nan)"),
        (-1, torch.int16, "0xffff"),
    ],
)
def test_bits_of_a_real_have_its_number_beside_them(value: float, dtype: torch.dtype, shown: str) -> None:
    """The fewest digits that are this number and no other of its dtype; of an integer the bits alone."""
    tensor = torch.tensor([value], dtype=dtype)
    bits = int(tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).item())
    assert str(Element((3,), (bits, bits), dtype)) == f"first at [3]: {shown} on rank 0, {shown} on rank 1"
