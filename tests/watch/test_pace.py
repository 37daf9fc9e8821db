"""A watch stays within its share of a step: it reads fewer updates in full, and loses no fault that lasts."""

from __future__ import annotations

import re
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.watch.pace import FULL, LONGEST, Pace
from tests.watch.small import answers, loss_of, net, sgd

LATER = FULL + 6  # an update that is not read in full by a watch that takes longer than its budget
TINY = 1e-9  # a budget that no watch can keep, so that it reads as few updates as it may


@pytest.mark.parametrize("every", [1, 2, 8, LONGEST])
def test_an_interval_leaves_no_gap_and_meets_every_phase_of_an_epoch(every: int) -> None:
    """A lasting fault is read after `every` + 1 updates at most. The last window of any epoch is read at some time."""
    pace = Pace(0.01, None)
    pace.every = every
    read = [number for number in range(1, 256 * LONGEST * 2) if pace.reads(number)]
    assert read[:FULL] == list(range(1, FULL + 1))
    assert max(b - a for a, b in pairwise(read)) <= every + 1
    assert len(read) <= len(range(256 * LONGEST * 2)) / every * 1.01 + 6 * LONGEST + FULL
    for epoch in (7, 64, 65, 96, 100):
        assert any(number % epoch == 0 for number in read if number > FULL)


def _loop(case: str, rank: int, steps: int, budget: float | None) -> tuple[dict[str, str], dict[str, int], int]:
    torch.manual_seed(0)
    model = nn.Sequential(net(), nn.Dropout(0.1))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    with andon.watch(wrapped, optimizer, budget=budget) as w:
        for step in range(1, steps + 1):
            later = step >= LATER
            if case == "reports rows" and later:
                w.batch([2 * step + rank])
            with wrapped.no_sync() if case == "averages" and later else nullcontext():
                wrapped(torch.randn(3, 4)).square().sum().backward()
            if case == "one gradient changes" and step == LATER and rank == 1:
                model[0][0].weight.grad[0, 0] += 1.0  # type: ignore[index]
            optimizer.step()
            optimizer.zero_grad()
            if case == "one rank changes" and step == LATER and rank == 1:
                model[0][0].weight.data[0, 0] += 1.0  # type: ignore[index]
            if case == "averages" and later and step % 10 == 0:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.data /= 2
    return {f"{each.clause} {each.step}": str(each) for each in w.findings}, w.evaluations, w.violations


def _cases(cases: dict[str, tuple[int, float | None]]) -> dict[str, Any]:
    return {case: _loop(case.partition(":")[0], dist.get_rank(), *given) for case, given in cases.items()}


def test_rare_reads_find_what_lasts_and_suspect_no_right_loop() -> None:
    """A weight of one rank that no version counter shows is found at the next full update. The message names the steps
    that were not read, and no cause, since it may be in them. A loop that begins to average its weights is only
    suspected. One that begins to report its rows is read at each update, as without budget.
    """
    end, steps = FULL + LONGEST, FULL + LONGEST + 60
    cases = {
        "one rank changes": (end, TINY), "one gradient changes": (end, TINY), "averages": (steps, TINY),
        "reports rows": (steps, TINY), "plain": (end, TINY), "plain: all": (end, None),
    }  # fmt: skip
    for of_rank in answers(2, _cases, cases):
        findings = {case: found for case, (found, _, _) in of_rank.items()}
        for case, clause in (("one rank changes", "replicas-agree"), ("one gradient changes", "optimizers-agree")):
            said = findings.pop(case)[f"{clause} {end}"]
            assert f"step {FULL}, not read again since; the fault lies in steps {FULL + 1} to {end}: budget" in said
            assert "likely" not in said
        assert [*findings.pop("averages")] == [f"replicas-agree {end}"]
        assert of_rank["averages"][2] == 0
        assert not any(findings.values())
        counts = {case: evaluations["gradients-agree"] for case, (_, evaluations, _) in of_rank.items()}
        assert counts["plain"] == FULL + 1
        assert counts["plain: all"] == end
        assert counts["reports rows"] == FULL + steps - LATER


def test_a_budget_is_a_share(capfd: pytest.CaptureFixture[str]) -> None:
    model = net()
    for wrong in (0, 1.5, "small"):
        with pytest.raises(ValueError, match="budget must be a share of a step"):
            andon.watch(model, sgd(model), budget=wrong)  # type: ignore[arg-type]
    optimizer = sgd(model)
    with andon.watch(model, optimizer, budget=TINY):
        for _ in range(LATER):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    said = capfd.readouterr().err
    assert f"were read in {FULL} of {LATER} updates, at last in 1 of {LONGEST}" in said
    both = re.search(rf"took ([\d.]+) % of the time, .+ in the first {FULL}, then ([\d.]+) % of the time, ", said)
    assert both is not None
    assert all(0 < float(share) < 100 for share in both.groups())
