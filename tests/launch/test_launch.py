"""Ranks in real processes: what they are given, how they end, and what the launcher makes of it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from andon.console.messages import Exit
from andon.launch.launcher import LaunchResult, launch, warm_up
from andon.launch.report import Report
from tests.launch.driver import PRELOAD
from tests.launch.pipes import Pipe

warm_up(PRELOAD)


def run(folder: Path, entry: str, payload: dict[str, Any], workers: int = 2) -> LaunchResult:
    return launch(f"tests.launch.entries:{entry}", payload, workers=workers, run_folder=folder, timeout_s=30)


def end(pipe: Pipe, workers: int = 2, **how: str) -> LaunchResult:
    """Launch ranks that end as told (`r1="raise"`), and see all of them gone."""
    told = {rank.removeprefix("r"): way for rank, way in how.items()}
    result = run(pipe.path.parent, "end", {"pipe": str(pipe.path), "how": told}, workers)
    pipe.wait_until_all_are_gone()
    return result


@pytest.mark.parametrize("workers", [1, 3])
def test_every_rank_gets_the_payload_as_it_was(tmp_path: Path, workers: int) -> None:
    payload: dict[str, Any] = {
        "folder": str(tmp_path),
        "a": [1, 0.1, None, True, "ü ${local_rank} $$ \U0001f6a8", {}],
        "say": "x" * 70000,
    }
    result = run(tmp_path, "echo", payload, workers)
    assert (result.exit, result.cause, result.first) == (Exit.OK, "", None)
    assert result.exits == dict.fromkeys(range(workers), 0)
    found = [json.loads((tmp_path / f"echo-{rank}.json").read_text()) for rank in range(workers)]
    assert [one["payload"] for one in found] == [payload] * workers
    assert {one["world_size"] for one in found} == {workers}
    assert len({one["run_id"] for one in found}) == 1


def test_the_place_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Today's variables not this process's rank; no blocked signal; its launcher; a store in a folder of its own."""
    monkeypatch.setenv("ANDON_TEST_VARIABLE", "set after the forkserver started")
    monkeypatch.setenv("RANK", "99")
    run(tmp_path, "echo", {"folder": str(tmp_path)})
    found = json.loads((tmp_path / "echo-1.json").read_text())
    assert found["variable"] == "set after the forkserver started"
    assert found["blocked"] == []
    assert found["launcher_pid"] == os.getpid()
    assert found["entered by"] == "drwx------"


@pytest.mark.parametrize("code", [code for code in Exit if code != Exit.OK])
def test_a_code_that_a_rank_chose_is_the_code_of_the_launch(pipe: Pipe, code: Exit) -> None:
    result = end(pipe, r1=str(int(code)))
    assert result.exit == code
    assert result.exits[1] == code
    assert result.cause.startswith("rank 1 of 2: ")


@pytest.mark.parametrize(
    ("how", "expected", "cause", "message"),
    [
        ("raise", Exit.CRASHED, ": LookupError: nobody foresaw this", r"(?s)Traceback.*and a second line"),
        ("violation", Exit.VIOLATION, ": weights agree broken at step 3 on rank 1 in lora_A: 2 digests", ""),
        (
            "mistake",
            Exit.USAGE,
            ": train.csv:17: label 9 is unknown",
            r"train\.csv:17: label 9 is unknown\n--workers: 0 is too few$",
        ),
        ("SIGKILL", Exit.RANK_LOST, " was killed by SIGKILL (", None),
        ("SIGSEGV", Exit.RANK_LOST, " was killed by SIGSEGV (", None),
    ],
)
def test_how_a_rank_ended_is_said_in_one_line_and_the_rest_is_in_its_report(
    pipe: Pipe, how: str, expected: Exit, cause: str, message: str | None
) -> None:
    result = end(pipe, workers=3, r2=how)
    assert result.exit == expected
    assert result.exits[2] == (-getattr(signal, how) if message is None else expected)
    assert result.cause.startswith(f"rank 2 of 3{cause}")
    assert result.report == Report.read(pipe.path.parent, 2)
    assert (result.report is None) == (message is None)
    if result.report is not None:
        assert re.match(message or "", result.report.message)
        clause = ("weights agree", 3) if how == "violation" else ("", 0)
        assert (result.report.clause, result.report.step) == clause


def test_an_entry_that_is_not_there_is_a_crash_that_names_it(tmp_path: Path) -> None:
    result = run(tmp_path, "absent", {}, workers=1)
    cause = "AttributeError: module 'tests.launch.entries' has no attribute 'absent'"
    assert (result.exit, result.cause) == (Exit.CRASHED, f"rank 0 of 1: {cause}")


def test_a_payload_that_is_not_json_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        launch("a:b", {"x": object()}, workers=1, run_folder=tmp_path, timeout_s=1.0)
    assert not any(tmp_path.iterdir())
