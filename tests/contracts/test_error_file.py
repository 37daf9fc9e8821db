"""Torch's error file: torch's own reader takes the right rank for the root cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from andon_contracts.error_file import VARIABLE, tell_launcher, write_error_file


def _failures(folder: Path, codes: dict[int, int]) -> ChildFailedError:
    return ChildFailedError(
        "loop", {rank: ProcessFailure(rank, 100 + rank, code, str(folder / str(rank))) for rank, code in codes.items()}
    )


def test_the_culprit_is_the_root_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 2, 1):
        monkeypatch.setenv(VARIABLE, str(tmp_path / str(rank)))
        tell_launcher("rank 1 of 3 failed\n  where    here", late=rank != 1)
    found = _failures(tmp_path, {0: 1, 1: 1, 2: 1})
    assert found.get_first_failure()[0] == 1
    assert "rank 1 of 3 failed\n    where    here" in found.format_msg().partition("Root Cause")[2]


def test_what_anybody_wrote_does_not_act_on_the_terminal_of_torchrun(tmp_path: Path) -> None:
    write_error_file(tmp_path / "0", "bad row \x1b]0;t\x07", "bad row \x1b]0;t\x07\n  \u202e", 1)
    printed = _failures(tmp_path, {0: 1}).format_msg()
    assert "bad row \\x1b]0;t\\x07\n    \\u202e" in printed
    assert "\x1b" not in printed


def test_a_killed_rank_without_a_file_is_the_root_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "0"))
    tell_launcher("rank 1 of 2 died", late=True)
    assert _failures(tmp_path, {0: 1, 1: -9}).get_first_failure()[0] == 1


def test_what_a_rank_wrote_of_itself_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "0"))
    tell_launcher("the cause", late=False)
    tell_launcher("something after it", late=False)
    assert "the cause" in (tmp_path / "0").read_text()
    tell_launcher("rank 1 died", late=True)
    assert "rank 1 died" in (tmp_path / "0").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_without_a_launcher_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    tell_launcher("x", late=False)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone" / "0"))
    tell_launcher("x", late=False)
    assert list(tmp_path.iterdir()) == []
