"""Elastic launches with real agents and workers, which kill each other, and what goes on after it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from andon.console.exits import Exit
from andon.launch import supervisor, worker_agents
from andon.launch.elastic import launch_elastic
from andon.launch.launcher import LaunchResult, warm_up
from andon.launch.sizes import Bounds, Sizing
from tests.launch.driver import PRELOAD
from tests.launch.pipes import Pipe

warm_up(PRELOAD)
DONE = {str(rank): "0" for rank in range(4)}


@dataclass
class Script:
    """How each rank of each generation ends, and what was asked for: (workers, whether it goes on)."""

    pipe: Pipe
    generations: list[Mapping[str, str]]
    asked: list[tuple[int, bool]] = field(default_factory=list)

    def payload(self, workers: int, again: bool) -> Mapping[str, Any]:
        self.asked.append((workers, again))
        return {"pipe": str(self.pipe.path), "how": self.generations[len(self.asked) - 1]}

    def run(self, least: int, most: int, max_restarts: int = 3) -> LaunchResult:
        result = launch_elastic(
            "tests.launch.entries:end",
            self.payload,
            Sizing(Bounds(least, most), max_restarts),
            run_folder=self.pipe.path.parent,
            timeout_s=30,
        )
        self.pipe.wait_until_all_are_gone()
        return result


def test_a_world_is_restarted_shrinks_and_grows(pipe: Pipe, capfd: pytest.CaptureFixture[str]) -> None:
    """A worker dies: same size. An agent dies: one less. More are asked for: one more. An agent leaves: one less."""
    story: list[Mapping[str, str]] = [
        {"1": "SIGKILL"},
        {"0": "agent SIGKILL"},
        {"1": "resize 3"},
        {"2": "agent SIGTERM"},
        DONE,
    ]
    script = Script(pipe, story)
    result = script.run(2, 3)
    assert (result.exit, result.cause) == (Exit.OK, "")
    assert script.asked == [(3, False), (3, True), (2, True), (3, True), (2, True)]
    assert not (pipe.path.parent / "reports" / "agents.json").exists()
    said = capfd.readouterr().err
    assert re.search(r"rank 1 of 3 was killed by SIGKILL \(.*\); restart 1 of 3", said)
    assert "rank 0 of 3 was lost together with the process that started it; 1 agent lost; going on with 2" in said
    assert "3 workers were asked for; going on with 3" in said
    assert "1 agent asked to leave; going on with 2" in said


def test_below_the_minimum_is_an_error_that_says_so(pipe: Pipe) -> None:
    script = Script(pipe, [{"1": "agent SIGKILL"}])
    result = script.run(2, 2)
    assert result.exit is Exit.RANK_LOST
    assert result.cause == (
        "rank 1 of 2 was lost together with the process that started it; "
        "1 agent lost; 1 left, fewer than the 2 of --workers 2:2"
    )


def test_a_worker_that_dies_again_and_again_is_given_up(pipe: Pipe) -> None:
    script = Script(pipe, [{"1": "SIGKILL"}, {"1": "SIGKILL"}, DONE])
    assert script.run(1, 2, max_restarts=1).exit is Exit.OK
    assert [workers for workers, _ in script.asked] == [2, 2, 1]


def test_a_broken_contract_is_not_tried_again(pipe: Pipe) -> None:
    script = Script(pipe, [{"0": "violation"}])
    result = script.run(1, 2)
    assert (result.exit, len(script.asked)) == (Exit.VIOLATION, 1)
    assert "weights agree" in result.cause


def test_an_agent_that_is_silent_is_lost(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "AGENT_S", 0.1)
    monkeypatch.setattr(supervisor, "END_S", 0.1)
    monkeypatch.setattr(worker_agents, "LAST_WORD_S", 0.1)
    script = Script(pipe, [{"0": "agent's silence"}, DONE])
    assert script.run(1, 2).exit is Exit.OK
    assert [workers for workers, _ in script.asked] == [2, 1]
