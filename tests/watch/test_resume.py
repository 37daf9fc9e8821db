"""A run that goes on in the ledger of another process is held to what that one left, and a right resume to nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from andon.run.ledger import read_ledger
from andon_contracts.record import Resume, Step
from tests.watch.clean_resumes import RIGHT, run
from tests.watch.small import answers

WRONG = {
    "rows again": ("plain DDP", {}, 6, "the rows of step 1 came again in the same pass over the data"),
    "rows skipped": ("an older checkpoint", {}, 6, "the rows of step 9 came too early, so that rows are skipped"),
    # No step shows the rows that follow, so the end of the pass does: 33 of 97 rows are left, of which 24 are skipped.
    "rows skipped ": (
        "plain DDP",
        {"stops": (5, 16)},
        11,
        "97 rows that went on after 40 of them left out about 23 rows",
    ),
    "second resume": ("resumed twice", {}, 9, "the rows of step 4 came again in the same pass over the data"),
    "rate": ("an older checkpoint", {}, 6, "the learning rate 0.01 is that of step 1; step 6 had 0.001667"),
    "rate ": ("AdamW and a schedule", {"told": False}, 6, "the learning rate 0.01 is that of step 1; step 5 had 0.002"),
    "optimizer": ("an average of the weights", {}, 6, "the optimizer state of step 5 is lost and begins anew"),
    "weights": (
        "AdamW and a schedule",
        {},
        6,
        "the weights are those of the start of the run, so they were not loaded",
    ),
    "weights ": (
        "an older checkpoint",
        {},
        6,
        "the weights are those of the start of the run, so they were not loaded",
    ),
    "wrapped again": (
        "an adapter that is saved alone",
        {},
        1,
        "2 trained tensors are lost (head.bias, ...); 2 trained ",
    ),
    "seeded again": (
        "mid-epoch, a sampler with a state",
        {},
        6,
        "the random stream of torch draws the numbers of step 1 ",
    ),
}


def _wrong(folder: str) -> list[list[tuple[str, int, str, bool]]]:
    said = []
    for fault, (name, changes, *_) in WRONG.items():
        place = Path(folder, fault)
        place.mkdir(exist_ok=True)
        *_, last = run(replace(RIGHT[name], fault=fault.strip(), **changes), place)
        said.append(
            [(f.clause, f.step, f.finding.seen, f.clause in last._context.verdicts.counts) for f in last.findings]
        )
    return said


def test_a_wrong_resume_is_suspected_once_with_what_is_wrong(tmp_path: Path) -> None:
    first, other = answers(2, _wrong, str(tmp_path))
    assert first == other
    for (fault, (*_, step, wanted)), found in zip(WRONG.items(), first, strict=True):
        assert [(clause, at, certain) for clause, at, _, certain in found] == [("resume-exact", step, False)], fault
        assert wanted in found[0][2]


def _resumed(folder: str) -> None:
    for name in ("plain DDP", "resumed twice"):
        Path(folder, name).mkdir(exist_ok=True)
        run(RIGHT[name], Path(folder, name))
        run(replace(RIGHT[name], stops=(5,), worlds=(2,)), Path(folder, name))


def test_the_steps_of_a_resumed_run_keep_their_numbers(tmp_path: Path) -> None:
    """Each process adds a line that says where it goes on; a run that is made again begins at the start."""
    answers(2, _resumed, str(tmp_path))
    for name, origins, numbers in (
        ("plain DDP", [0, 5, 0], [*range(1, 15), *range(1, 6)]),
        ("resumed twice", [0, 5, 0, 8, 0], [*range(1, 10), *range(9, 15), *range(1, 6)]),
    ):
        records = list(read_ledger(tmp_path / name / "ledger.jsonl"))
        assert [each.step for each in records if isinstance(each, Resume)] == origins
        assert [each.step for each in records if isinstance(each, Step)] == numbers
