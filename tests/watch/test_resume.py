"""A process that continues the ledger of another is held to what that one left; a right resume keeps its numbers."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path

from andon.run.ledger import read_ledger
from andon_contracts.record import Resume, Step
from tests.watch.clean_resumes import RIGHT, run
from tests.watch.small import answers

PLAIN, LATER, ADAMW = RIGHT["plain DDP"], RIGHT["an older checkpoint"], RIGHT["an average of the weights"]
ADAPTER, DROPOUT = RIGHT["an adapter that is saved alone"], RIGHT["a sampler with a state, in mid-epoch"]
WRONG = [
    (PLAIN, "rows again", 6, "the rows of step 1 came again in the same pass over the data"),
    (LATER, "rows skipped", 6, "the rows of step 9 came too early, so that rows are skipped"),
    # No step shows the rows that follow. But 57 of the 97 rows are left, and the pass ends after 33 of them.
    (replace(PLAIN, stops=(5, 16)), "rows skipped", 11, "97 rows that went on after 40 of them left out about 23 rows"),
    (RIGHT["twice"], "second resume", 9, "the rows of step 4 came again in the same pass over the data"),
    # The optimizer has the rate of its next update, and the schedule begins anew after it.
    (replace(LATER, make=PLAIN.make), "scheduler", 7, "the learning rate 0.0005 is that of step 2"),
    (replace(ADAMW, scheduled=True), "scheduler", 7, "the learning rate 0.005 is that of step 2"),
    (replace(ADAMW, scheduled=True), "optimizer", 6, "lost and begins anew; the learning rate 0.01 is that of step 1"),
    (ADAMW, "weights", 6, "the weights are those of the start of the run, so they were not loaded"),
    (replace(LATER, make=PLAIN.make), "weights", 6, "the weights are those of the start of the run"),
    (ADAPTER, "wrapped", 1, "4 trained tensors are lost (head.bias, ...); 2 trained tensors are new (1.bias, ...)"),
    (DROPOUT, "seeded again", 6, "the random stream of torch draws the numbers of step 1 again"),
]


def _wrong(folder: str) -> list[list[tuple[str, int, str]]]:
    said = []
    for number, (course, fault, *_) in enumerate(WRONG):
        place = Path(folder, str(number))
        place.mkdir(exist_ok=True)
        *_, last = run(replace(course, fault=fault), place)
        assert not last.violations
        said.append([(found.clause, found.step, found.finding.seen) for found in last.findings])
    return said


def test_a_wrong_resume_is_suspected_with_what_is_wrong(tmp_path: Path) -> None:
    first, other = answers(2, _wrong, str(tmp_path))
    assert first == other
    for (_, fault, step, wanted), found in zip(WRONG, first, strict=True):
        assert [each[:2] for each in found] == [("resume-exact", step)], fault
        assert wanted in found[0][2], fault


def _right(folder: str) -> list[int]:
    anew = []
    for name, course in RIGHT.items():
        Path(folder, name).mkdir(exist_ok=True)
        for stops, worlds in ((course.stops, course.worlds), ((4,), course.worlds[:1])):
            with contextlib.redirect_stderr(io.StringIO()) as said:
                run(replace(course, stops=stops, worlds=worlds), Path(folder, name))
            anew.append(said.getvalue().count("ledger is not continued; this one begins anew\n"))
    return anew


def test_steps_keep_their_numbers_and_a_run_that_is_made_again_begins_at_1(tmp_path: Path) -> None:
    anew, other = answers(2, _right, str(tmp_path))
    assert (anew, sum(other)) == ([0, 1] * len(RIGHT), 0)
    for name, course in RIGHT.items():
        records = list(read_ledger(tmp_path / name / "ledger"))
        begins = [0, *course.resumed, 0]
        parts = [range(begin + 1, stop + 1) for begin, stop in zip(begins, (*course.stops, 4), strict=True)]
        assert [each.step for each in records if isinstance(each, Step)] == [n for part in parts for n in part], name
        resumed = [each.step for each in records if isinstance(each, Resume)]
        assert resumed == [*course.resumed, 0], name
