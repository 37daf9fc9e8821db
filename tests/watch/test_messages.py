"""What is printed where ranks differ: fact, inference and scope apart, the minority by rank, and the bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from andon_contracts.violation import Violation
from andon_contracts.watch.exchange import Element
from andon_contracts.watch.standby import Standby
from tests.watch.small import answers, sgd, watched


class _Row(nn.Module):
    """Its loss is the sum of its parameter, whose gradient is therefore 1 in every element."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 3))

    def forward(self) -> torch.Tensor:
        return self.w.sum()


_UNREAD = "weights and moments agreed after step 1, not read again since"


def _raised(folder: str, disturb: Callable[..., object], kind: Any = torch.optim.SGD, rate: float = 0.5) -> Violation:
    """What two updates raise, where `disturb` comes before the second."""
    model = _Row()
    optimizer = kind(model.parameters(), lr=rate)
    told = {"action": "raise", "folder": folder, "allow": {"hyperparameters-agree": "the test sets them apart"}}
    with pytest.raises(Violation) as found:
        watched(model, optimizer, 2, lambda step: step == 2 and disturb(model, optimizer), _Row.forward, **told)
    return found.value


def _halve_rate(odd: tuple[int, ...]) -> Callable[..., None]:
    def disturb(model: _Row, optimizer: torch.optim.Optimizer) -> None:
        if dist.get_rank() in odd:
            optimizer.param_groups[0]["lr"] = 0.25

    return disturb


def _rate(folder: str, odd: tuple[int, ...]) -> Violation:
    return _raised(folder, _halve_rate(odd))


def _rewritten(folder: str) -> Violation:
    def disturb(model: _Row, optimizer: torch.optim.Optimizer) -> None:
        model.w.detach().add_(0)
        _halve_rate((1,))(model, optimizer)

    return _raised(folder, disturb)


def _own_rate(folder: str) -> Violation:
    return _raised(folder, lambda *_: None, rate=0.5 + dist.get_rank())


WHO = {
    (2, (1,)): "ranks 0 and 1 differ",
    (3, (2,)): "rank 2 of 3 differs from ranks 0, 1",
    (4, (3,)): "rank 3 of 4 differs from ranks 0, 1, 2",
    (4, (2, 3)): "ranks 0, 1 and ranks 2, 3 differ, with no majority",
}


@pytest.mark.parametrize(("world", "odd"), WHO)
def test_a_rank_with_its_own_rate_is_named(world: int, odd: tuple[int, ...], tmp_path: Path) -> None:
    """Every line of the message. The weights are -0.5 after step 1, and -1 or, at half the rate, -0.75 after step 2."""
    found = answers(world, _rate, str(tmp_path), odd)
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


@pytest.mark.parametrize(
    ("work", "moments"), [(_rewritten, "moments agreed after step 1, not read again since; "), (_own_rate, "")]
)
def test_weights_are_said_to_agree_before_an_update_where_they_were_read_then(
    work: Callable[[str], Violation], moments: str, tmp_path: Path
) -> None:
    """Before the first one, and where a version counter shows a write; moments are read after updates only."""
    said = str(answers(2, work, str(tmp_path))[0])
    assert f"\n  before   weights and reduced gradient agreed; {moments}lr differs: " in said


def test_one_rank_is_not_said_to_agree_with_itself(tmp_path: Path) -> None:
    """Neither what was equal before nor when it last was: there is nothing that it could have been equal to."""
    said = str(_raised(str(tmp_path), lambda model, _: model.w.grad.fill_(float("nan"))))
    assert "\n  state    step 2 was not applied\n" in said
    assert "\n  before" not in said


def _move_weight(model: _Row, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.w[1, 2] += dist.get_rank() == 1


def _move_moment(model: _Row, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.w]["exp_avg_sq"][0, 1] += dist.get_rank() == 1


def _at_once(folder: str) -> list[Violation]:
    return [_raised(folder, _move_weight), _raised(folder, _move_moment, torch.optim.AdamW)]


def test_the_element_is_one_of_what_differs(tmp_path: Path) -> None:
    """A weight that was moved before an update shows the weight's bits (-0.5 + 1), not the gradient's; a moment that
    was moved is named by its key."""
    moved = "0x3f000000 (0.5) on rank 1, 0xbf000000 (-0.5) on the others"
    for weight, moment in answers(3, _at_once, str(tmp_path)):
        assert str(weight).splitlines()[:2] == [
            "replicas-agree broken at step 2, before its update: rank 1 of 3 differs from ranks 0, 2.",
            f"  where    w (1 of 1 tensors), first at [1, 2]: {moved}",
        ]
        assert moment.clause == "optimizers-agree"
        assert "  where    w (1 of 1 tensors), exp_avg_sq first at [0, 1]: 0x" in str(moment)


def test_the_command_names_its_own_option() -> None:
    model = _Row()
    optimizer = sgd(model)
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
    tensor = torch.tensor([value], dtype=dtype)
    bits = int(tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).item())
    assert str(Element((3,), (bits, bits), dtype)) == f"first at [3]: {shown} on rank 0, {shown} on rank 1"
