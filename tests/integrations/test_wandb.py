"""Runs of wandb, read back from the files that it keeps offline: of a run, of one that was killed, and of a watch."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="wandb is not installed: pip install '.[wandb]'")

import wandb
from wandb.proto import wandb_internal_pb2

from andon.integrations.wandb import findings
from tests.integrations.told import measured, watched
from tests.training.runs import Runs, outcome

TRACKED = "run.report_to=[wandb]"
BLOCK, HEADER = 32768, 7


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def records(path: Path) -> Iterator[Any]:
    """What a file of wandb holds: LevelDB's log format, behind seven bytes of its own."""
    data, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # a whole record, or its last piece
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def shown(file: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = {each.key or ".".join(each.nested_key): json.loads(each.value_json) for each in record.history.item}
            for name, value in items.items():
                if "/" in name:
                    found.setdefault(name, {})[int(items["_step"])] = value
    return found


def files(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"))


def test_a_run_is_shown_as_its_metrics_have_it(runs: Runs, whole: Path, tmp_path: Path) -> None:
    assert not (whole / "wandb").exists()
    assert runs.train(tmp_path / "run", TRACKED) == 0
    assert outcome(tmp_path / "run") == outcome(whole)
    (file,) = files(tmp_path / "run")
    assert shown(file) == measured(tmp_path / "run")
    assert {"training/loss", "training/lr", "validation/accuracy"} <= shown(file).keys()
    (told,) = (each.run for each in records(file) if each.WhichOneof("record_type") == "run")
    assert (told.project, told.display_name) == ("andon", "run")
    assert {each.key for each in told.config.update} >= {"seed", "training", "optimizer"}


def test_a_run_that_was_killed_goes_on_as_the_same_one(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    runs.train(folder, TRACKED, backend="gloo", workers=2, entry="tests.training.entries:kill_rank")
    assert runs.train(folder, TRACKED, resume="auto") == 0
    first, last = files(folder)
    assert first.name == last.name == f"run-{(folder / 'wandb' / 'id').read_text()}.wandb"
    assert shown(last) == measured(folder)
    assert sorted(shown(last)["training/loss"]) == list(range(1, 13))


ALONE = """
import sys
from pathlib import Path
from andon.integrations.wandb import WandbRun
(Path(sys.argv[1]) / "m.jsonl").write_text('{"step": 1, "loss": 0.5}\\n')
run = WandbRun(Path(sys.argv[1]), Path(sys.argv[1]) / "m.jsonl", {})
run.line({"step": 1, "loss": 0.5})
run.close()
print("here")
"""


def test_without_a_key_nobody_is_asked_for_one(tmp_path: Path) -> None:
    """Online without a key: said once with what to do, where wandb itself would ask and wait."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", ALONE, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr
    assert "wandb: it has no key here: run wandb login, or set WANDB_MODE=offline" in done.stderr


def test_what_a_watch_finds_stands_beside_what_the_loop_logs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"call wandb.init\(\)"):
        findings()
    with wandb.init(dir=tmp_path, settings=wandb.Settings(console="off")) as run:
        watched(findings(), lambda update: run.log({"loop/update": update}))
    wandb.teardown()
    (file,) = files(tmp_path)
    found = shown(file)
    assert found["loop/update"] == {0: 0, 1: 1, 2: 2}
    assert [*found["andon/finite"]] == [1]
    assert "finite broken at step 2" in str(found["andon/finite"][1])
