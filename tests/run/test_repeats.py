"""What a step that is done again has as before: one list, by which a run, `diff` and `replay` go."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from andon.run.repeats import REPEATED, UNKNOWN, Difference, Repeats, differing, lacks
from andon_contracts.fields import Real
from andon_contracts.record import Step, StepDigests
from andon_contracts.violation import Violation
from tests.run.test_ledger import step

CHANGED = {
    "epoch": 1,
    "position": 5,
    "ids": (2, 4),
    "count": 3,
    "lr": Real.of(1e-4),
    "loss": Real.of(0.5000000000000001),
    "correct": 2,
    "terms": 8,
    "grad_norm": Real.of(-1.0),
    **{each.name: "ab" * 8 for each in fields(StepDigests)},
}
"""Of each field another value, where it can be by its last bit."""


def changed(record: Step, name: str, value: object) -> Step:
    if hasattr(record, name):
        return replace(record, **{name: value})  # type: ignore[arg-type]
    return replace(record, digests=replace(record.digests, **{name: value}))  # type: ignore[arg-type]


def test_where_a_step_was_done_is_no_difference() -> None:
    old = step(2)
    elsewhere = replace(old, world=4, backend="gloo", ranks=())
    assert differing(old, elsewhere) == ()
    Repeats({2: old}).judge(elsewhere)


@pytest.mark.parametrize("name", REPEATED)
def test_a_run_is_held_to_each_field_of_the_list(name: str) -> None:
    old = step(2)
    new = changed(old, name, CHANGED[name])
    (found,) = differing(old, new)
    assert (found.name, found.now) == (name, CHANGED[name])
    with pytest.raises(Violation, match=f"resume-exact broken at step 2: .*other results: {name}: .*, now ") as caught:
        Repeats({2: old}).judge(new)
    assert caught.value.clause == "resume-exact"
    Repeats({3: old}).judge(new)


def test_causes_come_before_effects() -> None:
    old = step(2)
    new = changed(changed(changed(old, "weights", "ab" * 8), "content", "ab" * 8), "loss", Real.of(2.0))
    assert [each.name for each in differing(old, new)] == ["content", "loss", "weights"]


def test_what_was_not_looked_at_is_no_difference_and_the_rest_is_compared() -> None:
    old = replace(step(2), digests=StepDigests(*[UNKNOWN] * 4))
    assert lacks(old, "weights")
    assert not lacks(old, "loss")
    assert differing(old, step(2)) == differing(step(2), old) == ()
    with pytest.raises(Violation, match="loss: "):
        Repeats({2: old}).judge(step(2, loss=0.25))


def test_a_difference_shows_reals_with_their_bits_and_cuts_what_is_long() -> None:
    assert str(Difference("loss", Real.of(0.5), Real.of(0.25))) == (
        "loss: 0.5 (0x1.0000000000000p-1), now 0.25 (0x1.0000000000000p-2)"
    )
    assert len(str(Difference("ids", tuple(range(9999)), ()))) < 1100


def test_the_list_has_all_of_a_step_but_where_it_was_done() -> None:
    of_a_watch = {"weights_norm", "gradient_at", "optimizer_index", "skipped", "draws"}
    places = {"step", "world", "backend", "ranks", "tensors"}
    known = {each.name for each in (*fields(Step), *fields(StepDigests))} - {"digests"}
    assert known - {*REPEATED} == of_a_watch | places
    assert {*REPEATED} == {*CHANGED}
