"""What a watch says, and how: on standard error, behind the user's own line, and one finding for one cause."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.clauses import CLAUSES
from tests.watch.small import answers, sgd, watched

SUSPECTED = 2
"""The update at which a parameter without a gradient is suspected."""


def _net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 3)))


def _own_rows(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return model(torch.randn(5, 4, generator=generator)).square().mean()


def _opened(verbose: bool) -> list[str]:
    model, said = _net(), io.StringIO()
    with contextlib.redirect_stderr(said):
        watch = andon.watch(model, sgd(model), verbose=verbose)
        lines = said.getvalue().splitlines()
        watch.close()
    return lines


def test_two_lines_open_a_watch_and_the_table_is_there_for_who_asks() -> None:
    """The second one names each argument that would have more watched; verbose lists every clause of a watch once."""
    first, second = _opened(verbose=False)
    assert re.fullmatch(
        r"andon.watch: 1 rank, 4 trainable tensors; \d+ of 33 clauses are held, verbose=True lists them", first
    )
    for argument in ("schedule=", "groups=", "clip=", "reference=", "updates="):
        assert f"({argument})" in second
    assert second.startswith("  not watched: replicas-agree, gradients-agree")
    table = _opened(verbose=True)
    assert table[0].endswith("clauses are held")
    named = [line.split()[0] for line in table[2:]]
    assert len(named) == len(set(named)) == 33
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
    model = DistributedDataParallel(_net())
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
        # After updates 2, 3 and 4, and before 3 and 4.
        assert said.count("  replicas-agree: 5 times\n") == (rank == 0)
        assert said.count("andon.Violation: ") == (rank == 0)
        assert said.count("of the same cause as hyperparameters-agree: replicas-agree, step 2: ") == (rank == 0)


def test_one_message_has_all_that_did_not_hold_of_an_update() -> None:
    """The first of the table of laws is the finding, and what else was seen stands in it."""
    model = _net()

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
    model = _net()
    model[0].register_parameter("spare", nn.Parameter(torch.zeros(2)))  # never used: suspicious after two updates
    watch = watched(model, sgd(model), SUSPECTED, schedule=lambda step: 0.2 if step >= SUSPECTED else 0.1)
    (found,) = watch.findings
    assert (found.clause, found.step, watch.violations) == ("learning-rate-planned", SUSPECTED, 1)
    assert "gradient-present" in str(found)
    assert "  1 violation, 1 suspicion, " in capsys.readouterr().err


def _one_module_apart() -> list[str]:
    inner = _net()
    inner[1][0].train(dist.get_rank() == 0)
    model = DistributedDataParallel(inner)
    return [str(found) for found in watched(model, sgd(model), 1).findings]


def test_a_mode_that_differs_is_named_by_module_and_ranks() -> None:
    for (said,) in answers(2, _one_module_apart):
        assert "1.0 is in training mode on rank 0, in evaluation mode on rank 1" in said


@pytest.mark.parametrize("name", ["0.weight", "0.bias"])
def test_a_frozen_weight_that_changed_is_named_in_one_process_too(name: str) -> None:
    model = _net()
    model[0].requires_grad_(False)

    def change(step: int) -> None:
        with torch.no_grad():
            model.get_parameter(name).add_(step == 2)

    found = watched(model, sgd(model[1]), 2, change).findings
    assert [(each.clause, each.tensor) for each in found] == [("base-frozen", name)]
