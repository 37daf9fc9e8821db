"""All laws of a step in one judgement: each evaluated once and counted once, and one row for trainer and watch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from andon_contracts.agree import Observation, bits_of
from andon_contracts.clauses import CLAUSES
from andon_contracts.laws import update
from andon_contracts.laws.law import LOCKSTEP, Judgement, Law, Seen
from andon_contracts.laws.update import ONE_UPDATE, OPTIMIZERS, REDUCED, REPLICAS, Reduced
from andon_contracts.policy import evaluations, reset_evaluations, suspended
from andon_contracts.watch.checks import buffers, frozen, gradients, mode, optimizer, structure, weights
from andon_contracts.watch.checks.audit import name_ratio
from andon_contracts.watch.checks.clipping import clip_once
from andon_contracts.watch.checks.reports import LoopReports
from andon_contracts.watch.checks.structure import Change, change_of
from andon_contracts.watch.judging import Verdicts
from andon_contracts.watch.settings import Settings

CHECKS = (
    structure.Structure,
    mode.Mode,
    optimizer.Optimizer,
    buffers.Buffers,
    weights.Weights,
    frozen.Frozen,
    gradients.Gradients,
    LoopReports,
    optimizer.Applied,
)
BEFORE = (LOCKSTEP, *(law for check in CHECKS for law in check.before_laws), clip_once(1e9, 0))
AFTER = (LOCKSTEP, *(law for check in CHECKS for law in check.after_laws))
START = structure.START


def values(text: str) -> dict[str, int]:
    """What a rank observes: `name=3` is a number or a digest, `name:0.1` are the bits of a real."""
    pairs = [re.fullmatch(r"(.+?)([=:])(.+)", each).groups() for each in text.split(", ")]
    return {name: int(value) if mark == "=" else bits_of(float(value)) for name, mark, value in pairs}


RIGHT = {name: 0 for law in (*BEFORE, *AFTER) for name in law.reads} | values(
    "layout=5, hyperparameters=6, rate:0.1, planned:0.1, modes=7, modules=7, buffers=8, "
    "caches=9, cache shapes=9, reduces=1, collectives=9, weights=10, "
    "gradient=11, norm:2.0, clipped:2.0, base=12, first base=12, "
    "optimizer=13, updates=4, unmoved due:1e-3, unmoved spacing:1e-8"
)

WRONG = {
    "parameters-kept": f"change={change_of(Change.REPLACED, 0)}, layout=4",
    "modes-agree": "modes=0",
    "hyperparameters-agree": "hyperparameters=0",
    "learning-rate-planned": "planned:0.2",
    "groups-planned": "ungrouped=1",
    "scaler-agrees": "scale=1",
    "buffers-agree": "buffers=1, caches=1",
    "finite": "nonfinite=1, norm:nan",
    "base-frozen": "base=0",
    "replicas-agree": "weights=0",
    "gradient-fresh": "stale=1",
    "gradient-present": "missing=1",
    "collectives-agree": "collectives=0, strided=1",
    "gradients-agree": "gradient=0",
    "clip-once": "clipped:1.0",
    "optimizers-agree": "optimizer=0, updates=5",
    "update-applied": "unmoved=1",
}
"""For each clause, values of the second rank that break it and, but for those named below, nothing else."""
ALL = frozenset(CLAUSES)


def _seen(**of_the_second: int) -> tuple[Observation, ...]:
    return tuple(Observation(rank, 3, 9, "here", {**RIGHT, **(of_the_second if rank else {})}) for rank in range(2))


def _judgement(table: str, observations: Sequence[Observation], live: Any = ALL) -> tuple[Judgement[Any], Verdicts]:
    verdicts = Verdicts(Settings(action=lambda _: None), live)
    seen = Seen(observations, None, ["a", "b"])
    return verdicts.judgement(TABLES[table], seen), verdicts


TABLES: Mapping[str, Sequence[Law[Seen[object]]]] = {"before": BEFORE, "after": AFTER}


@pytest.mark.parametrize("table", TABLES)
def test_what_is_right_holds_and_each_clause_is_counted(table: str) -> None:
    """One judgement evaluates every live law once: counted by the watch and by the process, however often one asks."""
    reset_evaluations()
    judgement, verdicts = _judgement(table, _seen())
    assert judgement.first is None
    assert list(judgement.broken()) == []
    wanted = Counter(law.clause for law in TABLES[table])
    assert verdicts.evaluations == wanted
    assert evaluations() == wanted


CASES = [(clause, *each) for clause, wrong in WRONG.items() for each in values(wrong).items()]


@pytest.mark.parametrize(("clause", "name", "value"), CASES, ids=[f"{clause}, {name}" for clause, name, _ in CASES])
def test_each_clause_can_fail_in_the_one_judgement(clause: str, name: str, value: int) -> None:
    """One wrong value is enough: the clause is among those broken, its row reads that value, all are counted."""
    table = next(t for t, laws in TABLES.items() if any(clause == law.clause and name in law.reads for law in laws))
    judgement, verdicts = _judgement(table, _seen(**{name: value}))
    broken = {law.clause: law for law in judgement.broken()}
    assert name in broken[clause].reads
    assert verdicts.evaluations == Counter(law.clause for law in TABLES[table])
    assert judgement.violation(broken[clause]).clause == clause


def test_what_follows_the_first_broken_law_is_not_evaluated_until_one_asks() -> None:
    """Who raises at the first law that is broken has evaluated those before it, and no others."""
    judgement, verdicts = _judgement("before", _seen(modes=0, gradient=0))
    assert judgement.first is not None
    assert judgement.first.clause == "modes-agree"
    assert dict(verdicts.evaluations) == {"halt-together": 1, "parameters-kept": 2, "modes-agree": 1}
    assert [law.clause for law in judgement.broken()] == ["modes-agree", "gradients-agree"]
    assert judgement.first.clause == "modes-agree"
    assert verdicts.evaluations == Counter(law.clause for law in BEFORE)


class _Reading(dict[str, int]):
    """Values that remember which of them were read."""

    def __init__(self, values: Mapping[str, int]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> int:
        self.read.add(name)
        return super().__getitem__(name)


UPDATED: tuple[Law[Any], ...] = (ONE_UPDATE, OPTIMIZERS, REPLICAS)  # the trainer's
ROWS = [
    *((law, None) for law in (*START, *BEFORE, *AFTER)),
    *((law, Reduced(12, 0.5)) for law in REDUCED),
    *((law, 4) for law in UPDATED),
]


@pytest.mark.parametrize(("law", "want"), ROWS, ids=[f"{law.id} {index}" for index, (law, _) in enumerate(ROWS)])
def test_a_row_reads_what_it_says(law: Law[Any], want: object) -> None:
    """A predicate looks at no other value than those of `reads`: what is to be observed can be told from the rows."""
    observed = [_Reading({**RIGHT, "imprecise": 0}) for _ in range(2)]
    law.check(Seen([Observation(rank, 3, 9, "here", each) for rank, each in enumerate(observed)], want))
    assert observed[0].read | observed[1].read <= set(law.reads)


@pytest.mark.parametrize(
    ("differing", "broken"),
    [
        (("modes",), ["modes-agree"]),
        (("modes", "modules"), []),
        (("hyperparameters",), ["hyperparameters-agree"]),
        (("hyperparameters", "layout"), ["parameters-kept"]),
        (("rate", "planned", "layout"), ["parameters-kept", "hyperparameters-agree"]),
    ],
)
def test_ranks_are_not_compared_in_what_other_modules_have(differing: Sequence[str], broken: list[str]) -> None:
    """Stages of a pipeline have other modules: their modes and the sizes of their groups are not of the same things."""
    judgement, _ = _judgement("before", _seen(**dict.fromkeys(differing, 99)))
    assert [law.clause for law in judgement.broken()] == broken


def test_the_likely_cause_follows_from_what_else_was_seen() -> None:
    """Ranks that clip and had one norm before it have clipped differently; a frozen parameter leaves a bucket alone."""
    frozen, apart = change_of(Change.FROZEN_BY_THE_LOOP, 0), {"clipping": 1, "norm": bits_of(9.0)}
    for more, wanted in (
        ({"clipping": 1}, "the ranks clipped"),
        (apart, "None"),
        ({"change": frozen}, "a parameter was"),
    ):
        found = gradients.GRADIENTS_AGREE.check(Seen(_seen(gradient=0, **more), None))
        assert str(found and found.likely).startswith(wanted)
    both = [replace(each, values={**each.values, "change": frozen}) for each in _seen()]
    judgement, _ = _judgement("before", both)
    assert "on all ranks, a is frozen now, but was" in str([judgement.violation(law) for law in judgement.broken()])
    undeclared = START[1].check(Seen(_seen(change=change_of(Change.FROZEN, 0)), None, ["a"]))
    assert "otherwise than trainable= declares" in str(undeclared)


def test_every_clause_of_a_step_is_among_the_cases() -> None:
    """Those without a case need several values or messages, and have tests of their own."""
    named = {law.clause for law in (*BEFORE, *AFTER)}
    assert named - set(WRONG) == {"halt-together", "loss-reported"}


def test_a_clause_that_is_not_live_is_neither_asked_nor_counted() -> None:
    judgement, verdicts = _judgement("before", _seen(modes=0), ALL - {"modes-agree"})
    assert judgement.first is None
    assert "modes-agree" not in verdicts.evaluations
    with suspended():
        judgement, verdicts = _judgement("before", _seen(modes=0))
        assert judgement.first is None
    assert not verdicts.evaluations


def test_trainer_and_watch_read_the_same_rows() -> None:
    """A clause that both have at one point is one row: whoever changes it changes it for both."""
    for ours, theirs in ((REDUCED, BEFORE), (UPDATED, AFTER)):
        by_id = {law.id: law for law in theirs}
        for law in ours:
            assert by_id.get(law.id, law) is law
    shared = {law.id for law in (*REDUCED, *UPDATED)} & {law.id for law in (*BEFORE, *AFTER)}
    assert shared == {"halt-together/any", "optimizers-agree/updated", "replicas-agree/updated"}


# A loop's schedule may be written twice, and its norm is torch's: a watch holds them to more than rounding.
RATES = ((1.0, False, False), (1 + 2**-52, True, False), (1 + 0.9e-9, True, False), (1 + 1.1e-9, True, True))
CLIPS = (
    *((1.0, False, False), (1 + 0.9 * 2**-19, False, False), (1 + 1.1 * 2**-19, True, False)),
    *((1 + 0.9e-3, True, False), (1 + 1.1e-3, True, True)),
)
CLIPPED = 2.0 * (1.0 / (2.0 + 1e-6))
RATE, CLIP = (update.RATE, optimizer.Optimizer.before_laws[1]), (update.CLIP, clip_once(1.0, 0))
HELD = [
    *((RATE, [f"rate:{0.1 * factor!r}, planned:0.1"] * 3, *broken) for factor, *broken in RATES),
    *((CLIP, [f"norm:2.0, clipped:{CLIPPED * factor!r}"] * 3, *broken) for factor, *broken in CLIPS),
    # The trainer holds a rank to the plan and the norm of most, a watch holds it to its own; that norms differ it says.
    (RATE, [*["rate:0.1, planned:0.1"] * 2, "rate:0.2, planned:0.2"], True, False),
    (RATE, [*["rate:0.1, planned:0.1"] * 2, "rate:0.1, planned:0.2"], False, True),
    (CLIP, [*["norm:2.0, clipped:1.0"] * 2, "norm:4.0, clipped:1.0"], False, True),
    (CLIP, [*["norm:2.0, clipped:1.0"] * 2, "norm:4.0, clipped:2.0"], True, True),
    (CLIP, [*["norm:2.0, clipped:1.0"] * 2, "norm:4.0, clipped:1.0, gradient=0"], False, False),
]
"""The two laws, what each rank observes, and whether that breaks the law of the trainer and of the watch."""


@pytest.mark.parametrize(("laws", "ranks", "ours", "theirs"), HELD, ids=map(str, range(len(HELD))))
def test_trainer_and_watch_have_their_own_measure(
    laws: Sequence[Law[Any]], ranks: list[str], ours: bool, theirs: bool
) -> None:
    said = [Observation(rank, 3, 9, "here", RIGHT | values(each)) for rank, each in enumerate(ranks)]
    wants = (Reduced(limit=1.0), None)
    broken = [law.check(Seen(said, want)) is not None for law, want in zip(laws, wants, strict=True)]
    assert broken == [ours, theirs]


@pytest.mark.parametrize(
    ("ratio", "world", "micro_batches", "said"),
    [
        (2.0, 2, 1, " = world size 2"),
        (2.0, 2, 2, " = world size 2 or accumulation 2"),
        (0.5, 2, 1, " = 1 / world size 2 or 1 of 2 micro-batches"),
        (0.5, 3, 1, " = 1 of 2 micro-batches"),
        (2 / 3, 2, 2, " = 2 of 3 micro-batches"),
        (0.7312, 2, 1, ""),
        (float("nan"), 2, 1, ""),
    ],
)
def test_a_factor_is_named_with_all_that_gives_it(ratio: float, world: int, micro_batches: int, said: str) -> None:
    assert name_ratio(ratio, world, micro_batches) == said
