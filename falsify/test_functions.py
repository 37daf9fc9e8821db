"""The seed's free functions do what their names say, and the tables that say so notice every mutant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from andon_contracts.policy import suspended
from andon_falsify.campaign.trial import LAW, Trial
from andon_falsify.campaign.warm_bench import AndonBench
from andon_falsify.compliance.cases import PLAIN
from andon_falsify.compliance.plugin import ClaimRunner
from falsify.power.coordinator import CoordinatorSubject
from falsify.power.functions import MUTANTS, TABLES, Call, Mutant, wrong_calls


@pytest.mark.parametrize("table", TABLES)
def test_the_functions_do_what_their_names_say(table: Callable[[], Iterator[Call]]) -> None:
    """With the contracts and without, every call has the result of its definition."""
    assert wrong_calls(table) == []
    with suspended():
        assert wrong_calls(table) == []


@pytest.mark.parametrize("mutant", [pytest.param(each, id=each.name) for each in MUTANTS])
def test_a_mutant_of_a_function_is_noticed(mutant: Mutant) -> None:
    """Its table notices it for its reason without the contracts; with them the table, or a violation, does too."""
    with ExitStack() as stack:
        mutant.plant(stack)
        assert wrong_calls(mutant.table)
        with suspended():
            found = wrong_calls(mutant.table)
    assert any(re.search(mutant.reason, each) for each in found), found
    assert wrong_calls(mutant.table) == []


@pytest.mark.parametrize("world", [2, 3])
def test_the_coordinator_keeps_the_law(runner: ClaimRunner, world: int) -> None:
    """`DataParallelCoordinator` on uneven shards and fewer samples than replicas, by the same reference (V1-V8)."""
    runner.require(*AndonBench(CoordinatorSubject()).attempt(Trial(LAW, PLAIN.but(world=world))).values())
