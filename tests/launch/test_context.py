"""Who a rank is, read from the variables of torch's launcher."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.console.problems import InputError
from andon.launch.context import RankContext, is_rank

GOOD = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "r"}


def test_the_variables_of_torchrun_are_read() -> None:
    """Under torchrun the parent is the agent."""
    assert RankContext.from_environment(GOOD) == RankContext(3, 1, 4, "r", os.getppid())


def test_our_launcher_names_the_agent() -> None:
    assert RankContext.from_environment(GOOD | {"ANDON_AGENT_PID": "77"}).agent_pid == 77


NEEDED = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"]


@pytest.mark.parametrize("missing", [*([name] for name in NEEDED), NEEDED])
def test_missing_variables_are_named_at_once(missing: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        RankContext.from_environment({key: value for key, value in GOOD.items() if key not in missing})
    found = {each.where for each in caught.value.problems if each.what.startswith("is not set")}
    assert found == set(missing)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("LOCAL_RANK", "2"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "5"),
        ("ANDON_AGENT_PID", "0"),
    ],
)
def test_a_senseless_variable_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(InputError) as caught:
        RankContext.from_environment(GOOD | {name: value})
    assert any(problem.where == name and value in problem.what for problem in caught.value.problems)


@settings(deadline=None)
@given(st.integers(1, 4096), st.data())
def test_every_rank_of_every_world_is_accepted(world: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    environ = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "r"}
    found = RankContext.from_environment(environ)
    assert (found.rank, found.world_size) == (rank, world)


def test_a_rank_is_told_from_a_plain_process() -> None:
    assert is_rank(GOOD)
    assert not is_rank({"RANK": "0"})
