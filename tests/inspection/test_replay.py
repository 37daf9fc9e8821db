"""`andon replay`: steps done again on other workers give the ledger's bits, or are said not to."""

from __future__ import annotations

import hashlib
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from andon.console.messages import InputError
from andon.inspection.difference import Comparison
from andon.inspection.recorded import open_recorded
from andon.inspection.replay import read_range, replay_run, settings
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerWriter, read_ledger
from andon_contracts.fields import Real
from andon_contracts.record import Record, Start, Step
from tests.inspection.ledgers import whole_run, write
from tests.training.runs import Runs


def content(folder: Path) -> dict[str, object]:
    """Every file with its bytes and the time of its last change, and every folder with its time."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in [folder, *sorted(folder.rglob("*"))]
    }


@pytest.mark.parametrize(
    ("steps", "workers", "backend"), [("1:2", 3, "inline"), ("8", 1, "inline"), ("7:8", 2, "gloo")]
)
def test_steps_done_again_are_the_ledgers_bits(run: Path, steps: str, workers: int, backend: str) -> None:
    before = content(run)
    report = replay_run(run, steps, workers, backend)
    assert report.result is Comparison.SAME, report.lines
    assert "to the bit" in report.lines[-1]
    assert report.lines[0].endswith(f"on {workers} {backend} worker{'s' * (workers > 1)}")
    assert content(run) == before


def test_the_nearest_checkpoint_is_taken(run: Path) -> None:
    assert "from      step-00000006, after step 6" in replay_run(run, "8:8", 1, "inline").lines[0]
    assert "from      the initial weights, after step 0" in replay_run(run, "2:2", 1, "inline").lines[0]


@pytest.mark.parametrize(("cores", "wanted"), [(1, 1), (3, 3), (64, 4)])
def test_the_folder_alone_does_not_say_how_many_processes_start(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, wanted: int
) -> None:
    """Anybody's folder may ask for 16,384. A core each, and no more than the 4 micro-batches; the bits are the same."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text().replace("workers: 2", "workers: 16384"))
    folder = RunFolder(tmp_path)
    assert settings(folder, None, None).run.workers == wanted
    assert settings(folder, None, "gloo").run.workers == wanted
    assert settings(folder, 5, None).run.workers == 5
    assert settings(RunFolder(run), None, None).run.workers == min(2, cores)


def _rewritten(run: Path, folder: Path, change: dict[int, Step], first: Start | None = None) -> Path:
    """The run in `folder` with another ledger, whose chain is whole: what a forger, or another machine, leaves."""
    folder.mkdir()
    for name in ("config.yaml", "provenance.json", "environment.json"):
        (folder / name).write_bytes((run / name).read_bytes())
    (folder / "checkpoints").mkdir()
    records: list[Record] = list(read_ledger(run / "ledger.jsonl"))
    with closing(LedgerWriter(folder / "ledger.jsonl")) as ledger:
        for record in records:
            if isinstance(record, Start) and first is not None:
                record = first
            ledger.append(change.get(record.step, record) if isinstance(record, Step) else record)
    return folder


def _step(run: Path, number: int) -> Step:
    return open_recorded(run).trajectory[number]


def test_what_differs_first_is_said(run: Path, tmp_path: Path) -> None:
    record = _step(run, 2)
    odd = replace(record, digests=replace(record.digests, gradient="ab" * 8, weights="cd" * 8))
    report = replay_run(_rewritten(run, tmp_path / "r", {2: odd}), "1:3", 1, "inline")
    assert report.result is Comparison.DIFFERENT
    assert report.lines[1] == "steps     1 to 1 equal the ledger, to the bit"
    now = record.digests
    assert report.lines[2] == f"differs   step 2: gradient first: ledger {'ab' * 8}, now {now.gradient}"
    assert report.lines[3] == f"differs   step 2: weights: ledger {'cd' * 8}, now {now.weights}"


def test_reals_are_compared_to_the_bit(run: Path, tmp_path: Path) -> None:
    record = _step(run, 1)

    odd = replace(record, loss=Real.of(math.nextafter(record.loss.value, math.inf)))
    report = replay_run(_rewritten(run, tmp_path / "r", {1: odd}), "1", 1, "inline")
    assert report.result is Comparison.DIFFERENT
    assert "step 1: loss first" in report.lines[1]


def test_another_machine_is_not_comparable(run: Path, tmp_path: Path) -> None:
    start = open_recorded(run).start
    assert start is not None
    elsewhere = replace(start, fingerprint={**start.fingerprint, "torch": "0.1"})
    record = _step(run, 1)
    odd = replace(record, digests=replace(record.digests, weights="cd" * 8))
    report = replay_run(_rewritten(run, tmp_path / "a", {1: odd}, elsewhere), "1", 1, "inline")
    assert report.result is Comparison.INCOMPARABLE
    assert "machine   torch: 0.1" in report.lines[1]
    assert replay_run(_rewritten(run, tmp_path / "b", {}, elsewhere), "1", 1, "inline").result is Comparison.SAME


def test_restored_weights_that_are_not_the_ledgers_are_said(run: Path, tmp_path: Path) -> None:
    start = open_recorded(run).start
    assert start is not None
    other = replace(start, digests={**start.digests, "weights": "12" * 8})
    report = replay_run(_rewritten(run, tmp_path / "r", {}, other), "1", 1, "inline")
    assert report.result is Comparison.DIFFERENT
    assert "the restored weights differ from the ledger" in report.lines[1]


def _on(rows: list[str], runs: Runs, run: Path, tmp_path: Path) -> Path:
    changed, folder = tmp_path / "train.jsonl", _rewritten(run, tmp_path / "r", {})
    changed.write_text("\n".join(rows) + "\n")
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace(str(runs.data), str(changed)))
    return folder


def test_other_data_cannot_be_replayed(runs: Runs, run: Path, tmp_path: Path) -> None:
    rows = runs.data.read_text().splitlines()
    folder = _on([rows[1], rows[0], *rows[2:]], runs, run, tmp_path)
    with pytest.raises(InputError, match=r"data: was .*replay needs the same"):
        replay_run(folder, "1", 1, "inline")


def test_ranks_that_cannot_replay_say_all_that_is_wrong(runs: Runs, run: Path, tmp_path: Path) -> None:
    folder = _on(['{"text": "", "label": 0}', '{"text": "a", "label": -1}'], runs, run, tmp_path)
    told = []
    for workers, backend in ((1, "inline"), (2, "gloo")):
        with pytest.raises(InputError) as caught:
            replay_run(folder, "1", workers, backend)
        told.append([str(each) for each in caught.value.problems])
    assert len(told[0]) == 2
    assert told[1] == told[0]


@pytest.mark.parametrize("text", ["", ":x", "1-2", "0:1", "2:1", "1:13", "a"])
def test_steps_that_are_none_are_refused(run: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"--steps: .*(within 1:12|write A:B)"):
        read_range(text, open_recorded(run))


@pytest.mark.parametrize(
    ("text", "range_"), [("2", (2, 2)), ("2:3", (2, 3)), ("11:", (11, 12)), (":2", (1, 2)), (":", (1, 12))]
)
def test_ranges(run: Path, text: str, range_: tuple[int, int]) -> None:
    assert read_range(text, open_recorded(run)) == range_


def test_a_ledger_alone_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is only a ledger"):
        replay_run(write(tmp_path / "l.jsonl", whole_run()), "1", None, None)
