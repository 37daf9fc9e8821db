"""`andon verify`: every checker on what runs left, and an exit code that says what came of it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from andon.config.load import template
from andon.inspection.recorded import open_recorded
from andon.metrics.scores import Confusion, digest_of, write_confusion
from andon_contracts.fields import Real
from andon_contracts.record import Broken, End, Evaluation, Record, Step
from andon_falsify.claims import plan_followed, schedule
from andon_falsify.claims.ledgers import ALL, read_run, recorded_violations, verify
from andon_falsify.claims.plan_followed import planned
from andon_falsify.cli.verify import report
from andon_falsify.cli.verify import verify as command
from andon_falsify.history import read_history
from andon_falsify.reference.published import PublishedSchedule
from andon_falsify.verdict import Outcome, closing_line, exit_code
from tests.cli.command import cli
from tests.inspection.ledgers import PLAN, digest, resumed_run, retracted_run, start, step, whole_run, write

HOLDS, FALSIFIED, NOT_APPLICABLE = Outcome.HOLDS, Outcome.FALSIFIED, Outcome.NOT_APPLICABLE


def outcomes(*paths: Path) -> dict[str, Outcome]:
    return {verdict.claim: verdict.outcome for verdict in verify([read_run(path) for path in paths])}


def test_a_good_ledger_holds(tmp_path: Path) -> None:
    verdicts = verify([read_run(write(tmp_path / "l.jsonl", whole_run()))])
    found = {verdict.claim: verdict.outcome for verdict in verdicts}
    held = {name for name, outcome in found.items() if outcome is HOLDS}
    assert held == {"replicas-agree", "samples-once", "chain-intact", "loss-finite"}
    assert set(found.values()) == {HOLDS, NOT_APPLICABLE}
    assert exit_code(verdicts) == 0
    in_new_ledger = write(tmp_path / "resumed.jsonl", [start(writer="watch"), *resumed_run()[4:]])
    assert outcomes(in_new_ledger)["resume-equal"] is NOT_APPLICABLE
    anew = replace(resumed_run()[4], step=0, name=None), step(1, (2, 0), weights=99)
    again = write(tmp_path / "anew.jsonl", [start(writer="watch"), step(1, (2, 0)), *anew])
    assert outcomes(again)["resume-equal"] is NOT_APPLICABLE
    rest = len(ALL) - 4
    assert closing_line(verdicts, 1) == f"checked 4 of {len(ALL)} claims, 1 run, {rest} not applicable, 0 unknown"


def _apart() -> list[Record]:
    first = step(1, (2, 0))
    return [start(), replace(first, ranks=(first.ranks[0], replace(first.ranks[1], weights=digest(99))))]


@pytest.mark.parametrize(
    ("claim", "records"),
    [
        ("samples-once", [start(), step(1, (2, 0)), step(2, (1, 1))]),
        ("replicas-agree", _apart()),
        ("resume-equal", [*resumed_run()[:5], step(2, (1, 3), weights=99)]),
        ("resume-equal", [start(writer="watch"), resumed_run()[4], step(3, (1, 3))]),
        ("loss-finite", [start(), step(1, (2, 0), loss=Real.of(math.inf))]),
    ],
)
def test_a_wrong_run_is_falsified(tmp_path: Path, claim: str, records: list[Record]) -> None:
    verdicts = verify([read_run(write(tmp_path / "l.jsonl", records))])
    (verdict,) = (each for each in verdicts if each.claim == claim)
    assert verdict.outcome is FALSIFIED
    assert f"repeat with: andon verify {tmp_path / 'l.jsonl'}" in str(verdict)
    assert exit_code(verdicts) == 1


def test_what_was_taken_back_is_no_other_result(tmp_path: Path) -> None:
    records = retracted_run()
    run = read_run(write(tmp_path / "l.jsonl", records))
    assert FALSIFIED not in {verdict.outcome for verdict in verify([run])}
    assert recorded_violations(run) == (
        "a violation: base-frozen at step 2 on rank 1, raised",
        "a retraction: steps 2 to 2 no longer count, for base-frozen",
    )
    without = [record for record in records if not isinstance(record, Broken)]
    assert outcomes(write(tmp_path / "without.jsonl", without))["resume-equal"] is FALSIFIED


def test_numbers_of_a_ledger_cost_no_work(tmp_path: Path) -> None:
    huge = 10**15
    records = [start(plan=replace(PLAN, steps=huge), world=huge), step(huge, (2, 0), world=huge)]
    run = read_run(write(tmp_path / "l.jsonl", records))
    assert Outcome.UNKNOWN in {verdict.outcome for verdict in verify([run])}  # of the ranks that left no digest
    assert schedule.check_history(run.history, PublishedSchedule(1.0, huge)).outcome is FALSIFIED
    planned(run.history)


def _folder(path: Path, records: list[Record], quoted: int) -> Path:
    path.mkdir()
    lines = write(path / "ledger.jsonl", records).read_bytes().splitlines()
    digest = hashlib.sha256(lines[quoted - 1]).hexdigest()[:16]
    (path / "summary.json").write_text(json.dumps({"ledger": {"count": quoted, "digest": digest}}))
    return path


def test_lines_cut_off_at_the_end_show_by_what_quotes_them(tmp_path: Path) -> None:
    run = _folder(tmp_path / "r", whole_run(), quoted=6)
    assert outcomes(run)["heads-quoted"] is HOLDS
    ledger = run / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    found = outcomes(run)
    assert found["chain-intact"] is HOLDS
    assert found["heads-quoted"] is FALSIFIED


def _scored(tmp_path: Path, rows: int = 4, accuracy: float = 0.75) -> tuple[Path, Path]:
    """A run folder with an evaluation of four rows, three of them right, and the file of its confusion matrix."""
    matrix = Confusion(5000, ((0, 0, 2), (17, 4999, 1), (4999, 4999, 1)))
    evaluation = Evaluation(2, 0, rows, {"accuracy": Real.of(accuracy)}, digest_of(matrix))
    run = _folder(tmp_path / f"r{rows}-{accuracy}", [*whole_run()[:3], evaluation], quoted=4)
    write_confusion(run / "confusion", matrix)
    return run, run / "confusion" / f"{digest_of(matrix)}.json"


def test_a_confusion_matrix_is_held_to_the_line_that_quotes_it(tmp_path: Path) -> None:
    run, file = _scored(tmp_path)
    assert outcomes(run)["heads-quoted"] is HOLDS
    assert outcomes(run / "ledger.jsonl")["heads-quoted"] is NOT_APPLICABLE
    file.write_text(file.read_text().replace("[0,0,2]", "[0,0,3]"))
    assert outcomes(run)["heads-quoted"] is FALSIFIED
    file.unlink()
    assert outcomes(run)["heads-quoted"] is FALSIFIED
    file.symlink_to("/dev/zero")
    assert outcomes(run)["heads-quoted"] is Outcome.UNKNOWN


@pytest.mark.parametrize("wrong", [{"rows": 5}, {"accuracy": 0.5}])
def test_scores_are_held_to_the_confusion_matrix(tmp_path: Path, wrong: dict[str, Any]) -> None:
    run, _ = _scored(tmp_path, **wrong)
    assert outcomes(run)["heads-quoted"] is FALSIFIED


def test_runs_are_compared_with_each_other(tmp_path: Path) -> None:
    one = write(tmp_path / "1.jsonl", whole_run())
    alone = [replace(each, world=1, ranks=each.ranks[:1]) if isinstance(each, Step) else each for each in whole_run()]
    assert outcomes(one, write(tmp_path / "2.jsonl", alone))["same-everywhere"] is HOLDS
    other = [
        replace(step(each.step, each.ids, weights=5), world=1) if isinstance(each, Step) else each for each in alone
    ]
    assert outcomes(one, write(tmp_path / "3.jsonl", other))["same-everywhere"] is FALSIFIED


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"identity": "1" * 64}, "settings"),
        ({"digests": {"weights": digest(100), "data": digest(8), "base": digest(2)}}, "data"),
        ({"digests": {"weights": digest(100), "data": digest(1), "base": digest(9)}}, "base model"),
    ],
)
def test_runs_of_different_jobs_are_not_comparable(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    """That their bits differ is nobody's fault: unknown with the reason, and what one ledger shows is said as ever."""
    ours = {"digests": {"weights": digest(100), "data": digest(1), "base": digest(2)}}
    one = write(tmp_path / "1.jsonl", [start(**ours), *whole_run()[1:]])
    steps = [replace(each, lr=Real.of(0.25)) if isinstance(each, Step) else each for each in resumed_run()]
    other = write(tmp_path / "2.jsonl", [start(**(ours | changes)), *steps[1:]])
    verdicts = {verdict.claim: verdict for verdict in verify([read_run(one), read_run(other)])}
    for claim in ("same-everywhere", "resume-equal"):
        why = f"not comparable: {one} and {other} are of different jobs: they differ in {said}"
        assert (verdicts[claim].outcome, verdicts[claim].why) == (Outcome.UNKNOWN, why)
    assert verdicts["chain-intact"].outcome is HOLDS
    assert exit_code(verdicts.values()) == 2


def test_the_settings_of_different_jobs_are_named_where_they_are_at_hand(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    changes = ("seed: 42", "seed: 43"), ("backend: gloo", "backend: nccl")
    for number, folder in enumerate(folders):
        folder.mkdir()
        old, new = changes[number - 1] if number else ("", "")
        (folder / "config.yaml").write_text(template().replace(old, new))
        write(folder / "ledger.jsonl", [start(identity=f"{number}" * 64), *whole_run()[1:]])
    runs = [read_run(folder) for folder in folders]
    (verdict,) = (each for each in verify(runs[:2]) if each.claim == "same-everywhere")
    assert verdict.why.endswith("they differ in seed")
    (verdict,) = (each for each in verify([runs[0], runs[2]]) if each.claim == "same-everywhere")
    assert "not comparable" not in verdict.why


def _said(claim: str, path: Path) -> tuple[Outcome, str]:
    (verdict,) = (each for each in verify([read_run(path)]) if each.claim == claim)
    return verdict.outcome, verdict.why


def test_a_ledger_without_an_end_is_not_called_one_in_which_nothing_went_wrong(tmp_path: Path) -> None:
    outcome, why = _said("halt-together", write(tmp_path / "killed.jsonl", whole_run()[:4]))
    assert outcome is Outcome.UNKNOWN
    assert "no end is recorded after step 2" in why
    ended = write(tmp_path / "failed.jsonl", [*whole_run()[:4], End(2, "failed", {})])
    outcome, why = _said("halt-together", ended)
    assert outcome is NOT_APPLICABLE
    assert "it ended with 'failed'" in why


BROKEN = Broken("gradients-agree", 2, (1,), "w", "they differ", {}, "warned")


def test_a_recorded_violation_is_told_beside_the_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = whole_run()
    path = write(tmp_path / "l.jsonl", [*records[:3], BROKEN, *records[3:]])
    assert command.main([str(path)], standalone_mode=False) == 1
    note = f"note: {path} records a violation: gradients-agree at step 2 on rank 1, warned"
    stands = f"broken: {path} has a violation, and no later resume made its step again"
    said = capsys.readouterr().out
    assert said.splitlines()[-3:-1] == [note, stands]
    assert "replicas-agree v1: violated when it ran, see below" in said  # the clause is a part of this claim
    assert "only reported" in _said("halt-together", path)[1]
    suspected = write(tmp_path / "s.jsonl", [*records[:3], replace(BROKEN, action="suspected"), *records[3:]])
    assert recorded_violations(read_run(suspected)) == ("a suspicion: gradients-agree at step 2 on rank 1, suspected",)
    assert report([suspected])[1] == report([write(tmp_path / "undone.jsonl", retracted_run())])[1] == 0


def _with_settings(folder: Path, records: list[Record]) -> Path:
    folder.mkdir()
    write(folder / "ledger.jsonl", records)
    rows = folder / "rows.jsonl"
    rows.touch()
    (folder / "config.yaml").write_text(f"data:\n  train: {rows}\n")
    return folder


def test_a_run_that_ended_before_its_first_epoch_has_a_plan_all_the_same(tmp_path: Path) -> None:
    run = _with_settings(tmp_path / "run", whole_run()[:2])
    for claim in ("samples-once", "plan-followed"):
        outcome, why = _said(claim, run)
        assert outcome is Outcome.UNKNOWN
        assert "no epoch was complete" in why


def test_a_configuration_that_cannot_be_read_spoils_only_the_claims_that_need_it(tmp_path: Path) -> None:
    run = _with_settings(tmp_path / "run", whole_run())
    without = outcomes(run / "ledger.jsonl")
    (run / "config.yaml").write_text("optimizer:\n  lr: banana\n")
    asks = ("plan-followed", "schedule")
    assert {name: found for name, found in outcomes(run).items() if name not in asks} == {
        name: found for name, found in without.items() if name not in asks
    }
    for claim in asks:
        outcome, why = _said(claim, run)
        assert outcome is Outcome.UNKNOWN
        assert "banana" in why


def test_the_command_joins_by_its_entry_point(tmp_path: Path) -> None:
    done = cli("verify", "-v", write(tmp_path / "l.jsonl", whole_run()))
    assert done.code == 0, done.said
    assert [line.split()[0] for line in done.out[:-1]] == [claim.name for claim in ALL]
    assert done.out[-1].startswith(f"checked 4 of {len(ALL)} claims, 1 run,")
    moot = [line.split()[0] for line in done.out if ": not applicable (" in line]
    brief = cli("verify", tmp_path / "l.jsonl").out
    assert brief[-2] == f"not applicable: {', '.join(moot)} (--verbose says why)"
    assert brief[:-2] + brief[-1:] == [line for line in done.out if line.split()[0] not in moot]


def test_a_command_whose_package_is_absent_says_so(tmp_path: Path) -> None:
    info = tmp_path / "plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[andon.commands]\njudge = absent_package.cli:judge\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "andon", "judge", "x", "--some", "y"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False, timeout=120
    )
    hint = "run: pip install '.[judge]' in a checkout of andon"
    assert (done.returncode, done.stderr) == (2, f"andon: andon judge: absent_package is not installed; {hint}\n")


def test_a_long_ledger_is_read_in_little_memory(tmp_path: Path) -> None:
    """Of a step on 512 rows `show` and `diff` hold less than 1 KB, and `verify` less than 4 KB, half of its objects."""
    rows, count = tuple(range(512)), 200
    steps = [replace(step(number, (2, 0)), ids=rows) for number in range(1, count + 1)]
    path = write(tmp_path / "l.jsonl", [start(), *steps])
    for read, most in ((lambda: open_recorded(path, facts=True), 1000), (lambda: read_history(path), 4000)):
        read()  # caches of readers
        tracemalloc.start()
        held = read()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held
        assert size / count < most


def test_an_epoch_of_many_rows_is_judged_in_little_memory(tmp_path: Path) -> None:
    """In less than 40 bytes a row: a table of all visits would take 150 more."""
    rows, count = 512, 96
    order = [*range(rows * count)]
    random.Random(f"andon order {PLAN.seed} 0").shuffle(order)
    steps: list[Record] = []
    for number in range(1, count + 1):
        first, ids = step(number, (2, 0)), tuple(order[rows * (number - 1) : rows * number])
        ranks = (replace(first.ranks[0], ids=ids[:200]), replace(first.ranks[1], ids=ids[200:]))
        steps.append(replace(first, ids=ids, count=rows, ranks=ranks))
    plan = replace(PLAN, rows=rows * count, batch_size=rows, steps=count)
    path = write(tmp_path / "l.jsonl", [start(plan=plan), *steps, End(count, "finished", {})])
    for _ in range(2):  # the first fills caches
        tracemalloc.start()
        run = read_run(path)
        found = {verdict.claim: verdict.outcome for verdict in verify([run])}
        assert found["samples-once"] is HOLDS
        assert plan_followed.check_history(run.history, planned(run.history) or {}).outcome is HOLDS
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak / rows / count < 40
