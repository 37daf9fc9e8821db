"""What a watch says, and how: fact and inference apart, the minority by rank, the bits, one finding for one cause."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.clauses import CLAUSES
from andon_contracts.violation import Violation
from andon_contracts.watch.exchange import element_text
from andon_contracts.watch.script import Standby
from tests.watch.small import answers, clauses, net, sgd, watched


class _Row(nn.Module):
    """Its loss is the sum of its parameter, whose gradient is therefore 1 in every element."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 3))

    def forward(self) -> torch.Tensor:
        return self.w.sum()


_UNREAD = "weights and moments agreed after step 1, not read again since"


def _raised(folder: str, disturb: Callable[..., object], kind: Any = torch.optim.SGD, rate: float = 0.5) -> Violation:
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
        "  likely   other arguments on one rank; if it differs later, a scheduler of its own  [inference, not proof]",
        "  state    step 2 was applied; last state known equal: step 1",
        f"  bundle   {tmp_path}/2  explain: andon explain {tmp_path}/2",
        '  silence  andon.watch(..., allow={"replicas-agree": "<reason>"})',
    ]
    assert found[0].bundle == f"{tmp_path}/2"


@pytest.mark.parametrize(
    ("work", "moments"), [(_rewritten, "moments agreed after step 1, not read again since; "), (_own_rate, "")]
)
def test_weights_are_said_to_agree_where_they_were_read(work: Callable[..., Any], moments: str, tmp_path: Path) -> None:
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
    assert str(found.value).endswith("\n  silence  --allow finite=<reason>\n  more     andon explain finite")


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
    assert element_text((3,), (bits, bits), dtype) == f"first at [3]: {shown} on rank 0, {shown} on rank 1"


def _own_rows(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return model(torch.randn(5, 4, generator=generator)).square().mean()


def test_two_lines_open_a_watch_and_the_table_is_there_for_who_asks(capsys: pytest.CaptureFixture[str]) -> None:
    """The last one names each argument that would have more watched; verbose lists every clause of a watch once."""
    model = net()
    with andon.watch(model, sgd(model)):
        first, dark, second = capsys.readouterr().err.splitlines()
    words = r"andon.watch: 1 rank, 4 trainable tensors; \d+ of (\d+) clauses can be checked, verbose=True lists them"
    opened = re.fullmatch(words, first)
    assert opened is not None
    for argument in ("schedule=", "groups=", "clip=", "reference=", "updates="):
        assert argument in second
    assert dark.startswith("  not watched: replicas-agree, optimizers-agree, gradients-agree")
    capsys.readouterr()
    with andon.watch(model, sgd(model), verbose=True):
        table = capsys.readouterr().err.splitlines()
    assert table[0].endswith("clauses can be checked")
    named = [line.split()[0] for line in table[3:]]
    assert len(named) == len(set(named)) == int(opened[1])
    assert set(named) <= set(CLAUSES)


SCRIPT = """
import warnings

import torch
from torch import nn

import andon
import driver_of_updates

warnings.filterwarnings("ignore")
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch = andon.watch(model, optimizer)
model(torch.full((1, 2), float("inf"))).sum().backward()
driver_of_updates.update(optimizer)
watch.close()
"""


def test_a_message_cannot_be_filtered_away_and_names_the_users_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The update is made by an installed library; what is named is the line of the script that called it."""
    library, script = tmp_path / "site-packages", tmp_path / "train.py"
    library.mkdir()
    (library / "driver_of_updates.py").write_text("def update(optimizer):\n    optimizer.step()\n")
    script.write_text(SCRIPT)
    monkeypatch.syspath_prepend(library)
    with warnings.catch_warnings():
        runpy.run_path(str(script))
    line = SCRIPT.splitlines().index("driver_of_updates.update(optimizer)") + 1
    assert f"{script}:{line}: andon.Violation: finite broken at step 1" in capsys.readouterr().err


def _one_rate_apart() -> tuple[list[str], str]:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    said, heard = io.StringIO(), list[str]()

    def part(step: int) -> None:
        if step == 2 and dist.get_rank() == 1:
            optimizer.param_groups[0]["lr"] = 0.05

    def note(told: dict[str, object]) -> None:
        heard.append(str(told["andon/clause"]))

    with contextlib.redirect_stderr(said):
        watched(model, optimizer, 4, part, _own_rows, action="warn", log=note)
    return heard, said.getvalue()


def test_what_follows_from_a_finding_is_listed_under_it() -> None:
    """One rate parts the weights, and then gradients and all: one finding; the rest is counted, and a line each."""
    for rank, (heard, said) in enumerate(answers(2, _one_rate_apart)):
        assert heard == ["hyperparameters-agree"]
        # After updates 2, 3 and 4, and before 3 and 4; checked at the start too.
        assert said.count("  replicas-agree: broken in 5 of 9 checks, first at step 2\n") == (rank == 0)
        assert said.count("andon.Violation: ") == (rank == 0)
        closing = (
            r"\n  \d clauses broken, 0 suspected; the watch took [\d.]+ % of the time, [\d.]+ ms per step, with its"
        )
        assert bool(re.search(closing, said)) == (rank == 0)
        assert said.count("same cause as hyperparameters-agree: replicas-agree, step 2: ") == (rank == 0)


def test_one_message_has_all_that_did_not_hold_of_an_update() -> None:
    """The first of the table of laws is the finding, and what else was seen stands in it."""
    model = net()

    def enlarge(_: int) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(1e6)

    with pytest.raises(andon.Violation) as caught:
        watched(model, sgd(model), 1, enlarge, action="raise", clip=1.0, schedule=lambda _: 0.2)
    said = str(caught.value)
    assert said.startswith("learning-rate-planned broken at step 1")
    assert re.search(r"^  also +clip-once, step 1: ", said, re.MULTILINE)


def test_a_suspicion_under_a_violation_is_counted_as_a_suspicion(capsys: pytest.CaptureFixture[str]) -> None:
    """It stands in the message of the violation, and makes no violation more."""
    model = net()
    model[0].register_parameter("spare", nn.Parameter(torch.zeros(2)))  # never used: suspicious after two updates
    watch = watched(model, sgd(model), 2, schedule=lambda step: 0.2 if step == 2 else 0.1)
    (found,) = watch.findings
    assert (found.clause, found.step, watch.violations) == ("learning-rate-planned", 2, 1)
    assert "gradient-present" in str(found)
    assert "  1 clause broken, 1 suspected; " in capsys.readouterr().err
    with pytest.raises(andon.Violation, match="gradient-present suspected at step 2"):
        watched(model, sgd(model), 2, action="strict")


def test_a_load_says_what_is_missing_then_which_value_differs(tmp_path: Path) -> None:
    model, path = net(), tmp_path / "c.pt"
    with andon.watch(model, adam := torch.optim.Adam(model.parameters(), lr=0.1)) as w:
        model(torch.ones(1, 4)).sum().backward()
        adam.step()
        w.saved(path)
    torch.rand(1)
    with andon.watch(model, adam, action="raise") as w:  # other random numbers stop no run
        w.loaded(path)
        assert clauses(w) == ["randomness-declared"]
    with andon.watch(model, torch.optim.Adam(model.parameters(), lr=0.2)) as w:
        w.loaded(path)
    (found,) = w.findings
    assert str(found).startswith("checkpoint-whole broken at the load of c.pt, saved after step 1: ")
    lost = "optimizer state 0.weight was saved but is missing now (and 3 more)"
    assert found.finding.seen == f"{lost}; parameter group 0, lr is 0.2, but was saved as 0.1"


def _one_module_apart() -> list[str]:
    inner = net()
    inner[1].train(dist.get_rank() == 0)
    model = DistributedDataParallel(inner)
    return [str(found) for found in watched(model, sgd(model), 1).findings]


def test_a_mode_that_differs_is_named_by_module_and_ranks() -> None:
    for (said,) in answers(2, _one_module_apart):
        assert "1 is in training mode on rank 0, in evaluation mode on rank 1" in said
