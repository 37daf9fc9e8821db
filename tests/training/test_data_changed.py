"""Whoever changes the data while a run goes on is told of it: the run is of the rows that it read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from andon.step.replica import Replica
from tests.training.runs import Runs, outcome, summary


def _append(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"text": "one more", "label": "red"}\n')


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a row more": (_append, "has 46 rows now, and 45 were read"),
    "other rows": (lambda path: path.write_text(path.read_text().replace("thing", "being")), "has 45 rows now"),
    "no rows": (lambda path: path.unlink(), "can no longer be read"),
    "only touched": (lambda path: path.touch(), ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_data_is_told_at_the_end(
    runs: Runs,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    change: str,
) -> None:
    do, words = CHANGES[change]
    own = Runs(Path(shutil.copy(runs.data, tmp_path / "train.jsonl")))
    update = Replica.apply

    def apply(replica: Replica) -> None:
        update(replica)
        if replica.updates == 5:
            do(own.data)

    monkeypatch.setattr(Replica, "apply", apply)
    assert own.train(tmp_path / "run") == 0
    assert outcome(tmp_path / "run") == outcome(whole)
    told = [line for line in capfd.readouterr().err.splitlines() if "data.train is not what this run was" in line]
    found = summary(tmp_path / "run").get("data_changed", {})
    assert len(told) == len(found) == (1 if words else 0)
    assert all(words in line for line in (*told, *found.values()))
