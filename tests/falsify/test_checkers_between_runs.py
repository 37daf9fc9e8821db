"""Checkers that compare histories or measurements: each accepts what is equal and rejects one difference."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon_falsify.checkers import (
    gradient_law,
    layout_equal,
    losses_close,
    memory_within,
    resume_equal,
    same_everywhere,
)
from andon_falsify.checkers.distance import Values, common_factor, flat, gap
from andon_falsify.checkers.ratio import explain_ratio
from andon_falsify.history import History, read_lines
from andon_falsify.verdict import Outcome
from tests.falsify.notation import history, says

HOLDS, FALSIFIED, UNKNOWN, INAPPLICABLE = Outcome.HOLDS, Outcome.FALSIFIED, Outcome.UNKNOWN, Outcome.NOT_APPLICABLE


ONE = "start fingerprint=x w=5 | 1: 0[a b] | 2: 0[c d] | end"
TWO = "start fingerprint=x w=5 | 1: 0[a] 1[b] | 2: 0[c] 1[d] | end"


def pair(other: str) -> list[History]:
    return [history(ONE, "alone"), history(other, "other", backend="gloo")]


def test_same_everywhere() -> None:
    says(same_everywhere.check(pair(TWO)), HOLDS)
    says(same_everywhere.check([*pair(TWO), history("start fingerprint=x | 1: 0[a] 1[b]", "cut")]), HOLDS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "w=9",
            (
                "step 2, other (world 2 gloo) against alone (world 1 inline): the weights differs first",
                "seen 0000000000000009",
            ),
        ),
        ("o=9", ("the optimizer differs first (content, loss, gradient, grad_norm, learning rate, weights agree)",)),
        ("g=9 w=9 o=9", ("the gradient differs first (content, loss, grad_norm, learning rate agree)",)),
        ("loss=2 w=9", ("the loss differs first",)),
        ("lr=2 w=9", ("the learning rate differs first",)),
        ("norm=2", ("the grad_norm differs first",)),
        ("d=9 loss=2", ("the content differs first",)),
        ("ids=d,c", ("the rows differ first, at place 0 of the batch", "expected c, seen d")),
        ("ids=c,d,e", ("at place 2", "expected None, seen e")),
    ],
)
def test_same_everywhere_rejects(change: str, words: tuple[str, ...]) -> None:
    says(same_everywhere.check(pair(TWO.replace("1[d]", f"1[d] {change}"))), FALSIFIED, "step 2", *words)


def test_same_everywhere_names_the_first_step_only() -> None:
    text = TWO.replace("1[b]", "1[b] w=9").replace("1[d]", "1[d] w=9")
    verdict = same_everywhere.check(pair(text))
    says(verdict, FALSIFIED, "step 1,")
    assert len(verdict.counterexamples) == 1


def test_same_everywhere_looks_before_the_first_step_and_after_the_last() -> None:
    says(same_everywhere.check(pair(TWO.replace("w=5", "w=6"))), FALSIFIED, "the initial weights differ")
    shorter = "start fingerprint=x w=5 | 1: 0[a] 1[b] | end"
    says(same_everywhere.check(pair(shorter)), FALSIFIED, "another number of updates", "expected 2 updates, seen 1")


def test_same_everywhere_infers_nothing_from_what_is_not_comparable() -> None:
    says(same_everywhere.check(pair(TWO.replace("=x", "=y"))), INAPPLICABLE, "not comparable")
    says(same_everywhere.check([history(ONE), history(ONE)]), UNKNOWN, "every history ran on world 1 inline")
    says(same_everywhere.check([history(ONE)]), UNKNOWN, "at least two")
    says(same_everywhere.check(pair("start fingerprint=x | 3: 0[e] 1[f]")), UNKNOWN, "nothing that can be compared")
    bare = read_lines([b'{"v":1,"kind":"step","step":1,"world":9,"digests":{"content":"00000000000000d1"}}\n'], "bare")
    says(same_everywhere.check([history("1: 0[a b]"), bare]), UNKNOWN, "nothing that can be compared")


@given(st.integers(2, 5), st.integers(1, 4), st.data())
def test_same_everywhere_finds_the_first_of_any_differences(runs: int, steps: int, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(10, 99), min_size=steps, max_size=steps))

    def text(world: int, shift: dict[int, int]) -> str:
        ranks = " ".join(f"{rank}[{rank}]" for rank in range(world))
        numbers = ",".join(str(row) for row in range(5))
        return " | ".join(
            f"{step}: {ranks} ids={numbers} w={value + shift.get(step, 0)}"
            for step, value in enumerate(weights, start=1)
        )

    same = [history(text(world, {}), f"world {world}") for world in range(1, runs + 1)]
    says(same_everywhere.check(same), HOLDS)
    first = data.draw(st.integers(1, steps))
    odd = history(text(runs, dict.fromkeys(range(first, steps + 1), 100)), "odd")
    says(same_everywhere.check([*same[:-1], odd]), FALSIFIED, f"step {first}, odd")


WHOLE = "1: 0[a] | 2: 0[b] | 3: 0[c] | 4: 0[d] | end"
RESUMED = "1: 0[a] | 2: 0[b] | 3: 0[c] | resume step=1 | 2: 0[b] | 3: 0[c] | 4: 0[d] | end"


def test_resume_equal() -> None:
    says(resume_equal.check(history(RESUMED), history(WHOLE)), HOLDS)
    says(resume_equal.check(history(RESUMED)), HOLDS)
    says(
        resume_equal.check(history("1: 0[a] | resume step=1 | 2: 0[b] | end"), history("1: 0[a] | 2: 0[b] | end")),
        HOLDS,
    )


@pytest.mark.parametrize("change", ["w=9", "o=9", "g=9", "d=9", "loss=3", "lr=3", "norm=3", "ids=x"])
def test_resume_equal_rejects_any_difference(change: str) -> None:
    again = RESUMED.replace("4: 0[d]", f"4: 0[d] {change}")
    says(resume_equal.check(history(again), history(WHOLE)), FALSIFIED, "step 4 of history", "uninterrupted")
    before, _, after = RESUMED.partition("resume")
    changed = f"{before}resume{after.replace('2: 0[b]', f'2: 0[b] {change}')}"
    says(resume_equal.check(history(changed)), FALSIFIED, "step 2 of history", "done again after a resume")


BROKEN = "1: 0[a] | checkpoint step=1 | 2: 0[b] w=9 | violation clause=base-frozen step=2 applied=True"
UNBROKEN = BROKEN.partition(" | violation")[0]
TAKEN = "retraction step=1 last=2 clause=base-frozen"
AGAIN = "resume step=1 | 2: 0[b] | 3: 0[c] | end"


def test_what_a_violation_took_back_is_not_compared() -> None:
    """It is nobody's truth; without the line that takes it back it would be."""
    taken = f"{BROKEN} | {TAKEN} | {AGAIN}"
    says(resume_equal.check(history(taken), history("1: 0[a] | 2: 0[b] | 3: 0[c] | end")), HOLDS)
    says(resume_equal.check(history(f"{BROKEN} | {AGAIN}")), FALSIFIED, "done again after a resume")
    assert list(history(f"{BROKEN} | {TAKEN}").trajectory) == [1]


@pytest.mark.parametrize(
    "text",
    [
        f"{UNBROKEN} | {TAKEN} | {AGAIN}",
        f"{UNBROKEN} | {TAKEN}",
        f"{BROKEN} | {TAKEN.replace('base-frozen', 'finite')} | {AGAIN}",
        f"{BROKEN} | {TAKEN.replace('step=1 last=2', 'step=0 last=1')} | {AGAIN}",
        f"{BROKEN} | resume step=1 | {TAKEN} | 2: 0[b]",
        f"{BROKEN.replace('applied=True', 'action=suspected')} | {TAKEN} | {AGAIN}",
        "1: 0[a] | 2: 0[b] | 3: 0[c] | violation clause=x step=3 | retraction step=2 last=3 clause=x | resume step=0",
    ],
    ids=range(7),
)
def test_updates_cannot_be_disowned(text: str) -> None:
    """Without a violation, with another's, of fewer than stand, after a resume, for a suspicion, to no checkpoint."""
    says(resume_equal.check(history(text)), FALSIFIED, "taken back without right")


def test_a_retraction_over_two_lives_takes_both_back() -> None:
    lives = "1: 0[a] | 2: 0[b] | 3: 0[c] | resume step=1 | 2: 0[b] | violation clause=x step=2"
    found = history(f"{lives} | retraction step=1 last=3 clause=x")
    assert list(found.trajectory) == [1]
    says(resume_equal.check(found), UNKNOWN)


def test_resume_equal_notices_what_is_missing() -> None:
    skipped = "1: 0[a] | 2: 0[b] | resume step=2 | 4: 0[d] | end"
    says(resume_equal.check(history(skipped), history(WHOLE)), FALSIFIED, "step 4: step 3 was never done")
    inside = "1: 0[a] | resume step=1 | 2: 0[b] | 4: 0[d] | end"
    says(resume_equal.check(history(inside), history(WHOLE)), FALSIFIED, "step 4: step 3 was never done")
    early = "1: 0[a] | resume step=1 | 2: 0[b] | end"
    says(resume_equal.check(history(early), history(WHOLE)), FALSIFIED, "ended early", "expected 4 updates, seen 2")
    says(resume_equal.check(history(early.removesuffix(" | end")), history(WHOLE)), UNKNOWN, "got to step 2 of 4")


def test_resume_equal_infers_nothing_without_a_resume() -> None:
    says(resume_equal.check(history(WHOLE), history(WHOLE)), UNKNOWN, "was never resumed")
    says(resume_equal.check(history("1: 0[a] | resume step=1 | 2: 0[b]")), UNKNOWN)
    says(resume_equal.check(history("resume step=1 | 5: 0[b]"), history(WHOLE)), FALSIFIED, "step 1 was never done")


def test_losses_close() -> None:
    law = [1.0] * 101
    says(losses_close.check([9.0] * 99 + [1.009, 0.991], law), HOLDS)
    says(
        losses_close.check([1.0] * 99 + [1.0, 1.02], law),
        FALSIFIED,
        "step 101",
        "1 of 2 updates",
        "expected 1, seen 1.02",
    )
    says(losses_close.check([0.75, 0.0], [1.0, 0.0], start=1, bound=0.25), FALSIFIED, "step 1")
    says(losses_close.check([1.0, 0.0], [1.0, 0.0], start=1), HOLDS)


def test_losses_close_names_one_factor() -> None:
    """HF's logged loss: accumulation x world too big at every update; no ratio where it is not one."""
    law = [1.0, 0.5, 0.25]
    factors = {"world": 2, "accumulation": 2}
    says(
        losses_close.check([4.0, 2.0, 1.0], law, start=1, factors=factors),
        FALSIFIED,
        "ratio 4.000 = accumulation 2 x world 2",
    )
    verdict = losses_close.check([4.0, 2.0, 0.25], law, start=1, factors=factors)
    assert verdict.counterexamples[0].ratio is None
    assert losses_close.check([1.0, 2.0], [0.0, 1.0], start=1).counterexamples[0].ratio is None


@pytest.mark.parametrize("broken", [math.nan, math.inf, None])
def test_losses_close_and_what_is_not_finite(broken: float | None) -> None:
    says(losses_close.check([broken, 1.0], [1.0, 1.0], start=2), FALSIFIED, "step 1: the loss is not finite")
    says(losses_close.check([1.0, 1.0], [1.0, broken], start=1), UNKNOWN, "reference's loss at step 2")
    says(losses_close.check([1.0, 1.0], [broken, 1.0], start=2), HOLDS)


def test_losses_close_infers_nothing_from_too_little() -> None:
    says(losses_close.check([], []), UNKNOWN)
    says(losses_close.check([1.0] * 99, [1.0] * 99), UNKNOWN, "99 updates, the claim begins at update 100")
    says(losses_close.check([1.0] * 100, [1.0] * 101), UNKNOWN, "100 losses against 101")
    says(losses_close.check([1.0] * 99 + [2.0], [1.0] * 101), FALSIFIED)


def test_memory_within() -> None:
    says(memory_within.check({0: 110, 1: 100}, 100), HOLDS)
    says(
        memory_within.check({0: 100, 1: 111}, 100), FALSIFIED, "rank 1: the peak is 1.110 of the plan, 1.10 is allowed"
    )
    says(memory_within.check({0: 100, 1: 111}, {0: 100, 1: 110}), HOLDS)
    says(memory_within.check({0: 130}, 100, slack=0.3), HOLDS)


def test_memory_within_infers_nothing_from_what_was_not_counted() -> None:
    says(memory_within.check({}, 100), UNKNOWN)
    says(memory_within.check({0: 0}, 100), UNKNOWN, "peak 0 bytes")
    says(memory_within.check({0: 1, 1: 1}, {0: 100}), UNKNOWN, "rank 1", "plan 0 bytes")


def test_memory_that_grows_with_every_update() -> None:
    """Rising from the second update on is growth; the first jump is the optimizer's, and a plateau is none."""
    says(memory_within.check({0: 9}, 9, resting={0: [1, 5, 5, 5, 5]}), HOLDS)
    says(memory_within.check({0: 9}, 9, resting={0: [1, 5, 6, 7, 7]}), HOLDS)
    says(
        memory_within.check({0: 9}, 9, resting={0: [1, 5, 6, 7, 8]}),
        FALSIFIED,
        "rise with every update",
        "seen 8 bytes",
    )
    says(memory_within.check({0: 9}, 9, resting={0: [1, 5, 6, 7]}), UNKNOWN, "4 updates are too few")


LAYOUT = [("a", (2, 3), "float32"), ("b", (3,), "float32")]


def test_layout_equal() -> None:
    says(layout_equal.check({"rank 0": LAYOUT, "rank 1": list(LAYOUT)}), HOLDS)
    says(layout_equal.check({"rank 0": LAYOUT}), INAPPLICABLE)
    says(layout_equal.check({}), UNKNOWN)
    says(layout_equal.check({"rank 0": [], "rank 1": []}), UNKNOWN, "the layout of rank 0 is empty")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([("x", (2, 3), "float32"), LAYOUT[1]], ("tensor 0, gpu against cpu", "seen x [2, 3] float32")),
        ([("a", (3, 2), "float32"), LAYOUT[1]], ("seen a [3, 2] float32",)),
        ([LAYOUT[0], ("b", (3,), "float16")], ("tensor 1", "seen b [3] float16")),
        (LAYOUT[::-1], ("tensor 0",)),
        (LAYOUT[:1], ("tensor 1", "seen no tensor")),
        ([*LAYOUT, LAYOUT[0]], ("tensor 2", "expected no tensor")),
    ],
)
def test_layout_equal_rejects(other: list[layout_equal.Tensor], words: tuple[str, ...]) -> None:
    says(layout_equal.check({"cpu": LAYOUT, "gpu": other}), FALSIFIED, *words)


GRADIENT: dict[str, Values] = {"a": [3.0, 4.0], "b": [[1.0], [2.0]]}
VALUES = st.floats(-1e6, 1e6).filter(lambda value: abs(value) > 1e-6)
GRADIENTS = st.dictionaries(st.sampled_from("abcd"), st.lists(VALUES, min_size=1, max_size=5), min_size=1)


def test_gradient_law() -> None:
    says(gradient_law.check(GRADIENT, GRADIENT), HOLDS, "largest relative error 0.00e+00")
    for error, outcome in ((1e-6, HOLDS), (3e-6, FALSIFIED)):
        seen: dict[str, Values] = {**GRADIENT, "a": [3.0 + 5.0 * error, 4.0]}
        says(gradient_law.check(seen, GRADIENT), outcome)
    says(
        gradient_law.check({**GRADIENT, "a": [4.0, 3.0]}, GRADIENT, where="step 7"),
        FALSIFIED,
        "step 7: 1 of 2 tensors",
        "a 0.283",
    )


@given(GRADIENTS, st.sampled_from([2.0, 0.5, 3.0, 12.0, -1.0]))
def test_gradient_law_names_the_factor(expected: dict[str, Values], factor: float) -> None:
    seen: dict[str, Values] = {name: [factor * value for value in flat(values)] for name, values in expected.items()}
    verdict = gradient_law.check(seen, expected)
    says(verdict, FALSIFIED)
    assert verdict.counterexamples[0].ratio == pytest.approx(factor, rel=1e-9)
    says(gradient_law.check(expected, expected), HOLDS)


def test_gradient_law_explains_the_factor() -> None:
    seen: dict[str, Values] = {"a": [12.0, 16.0], "b": [4.0, 8.0]}
    factors = {"world": 2, "accumulation": 2}
    says(gradient_law.check(seen, GRADIENT, factors=factors), FALSIFIED, "ratio 4.000 = accumulation 2 x world 2")


@pytest.mark.parametrize(
    "seen",
    [
        {"a": [6.0, 8.0], "b": [1.0, 2.0]},
        {"a": [8.0, 6.0], "b": [2.0, 1.0]},
        {"a": [3.0, 4.0], "b": [1.0, 2.1]},
        {"a": [6.0, 8.0], "b": [2.0, 1.0]},
        {"a": [3.00002, 4.00002], "b": [1.00001, 2.00001]},
    ],
    ids=["one-tensor-doubled", "permuted", "one-value", "one-doubled-one-permuted", "nearly-1"],
)
def test_gradient_law_names_no_factor_where_there_is_none(seen: dict[str, Values]) -> None:
    assert gradient_law.check(seen, GRADIENT).counterexamples[0].ratio is None


def test_gradient_law_of_no_gradient_at_all() -> None:
    """Zeros for everything (the seed's surviving mutant) are 0 times the law."""
    seen: dict[str, Values] = {"a": [0.0, 0.0], "b": [0.0, 0.0]}
    says(gradient_law.check(seen, GRADIENT), FALSIFIED, "2 of 2 tensors", "ratio 0")


def test_gradient_law_of_other_tensors() -> None:
    says(gradient_law.check({"a": [3.0, 4.0]}, GRADIENT), FALSIFIED, "b has another layout", "seen no gradient")
    says(
        gradient_law.check({**GRADIENT, "c": [1.0]}, GRADIENT),
        FALSIFIED,
        "c has another layout",
        "expected no gradient",
    )
    says(gradient_law.check({**GRADIENT, "b": [1.0]}, GRADIENT), FALSIFIED, "expected 2 elements, seen 1 elements")
    says(gradient_law.check({**GRADIENT, "b": [1.0, math.nan]}, GRADIENT), FALSIFIED, "b inf")


def test_gradient_law_of_a_tensor_whose_law_is_zero() -> None:
    law: dict[str, Values] = {**GRADIENT, "z": [0.0, 0.0]}
    says(gradient_law.check(law, law), HOLDS)
    says(gradient_law.check({**law, "z": [0.0, 1e-9]}, law), FALSIFIED, "z inf")
    says(gradient_law.check({**law, "z": [0.0, 1e-9]}, law, floor=1e-3), HOLDS)
    says(gradient_law.check({**law, "z": [0.0, 1e-1]}, law, floor=1e-3), FALSIFIED)
    says(gradient_law.check({"z": [0.0]}, {"z": [0.0]}), UNKNOWN, "0 everywhere")
    says(gradient_law.check({}, {}), UNKNOWN)
    says(gradient_law.check(GRADIENT, {**GRADIENT, "a": [math.inf, 0.0]}), UNKNOWN, "expected gradient is not finite")


def test_gradient_law_shows_the_worst_few() -> None:
    law: dict[str, Values] = {name: [1.0] for name in "abcde"}
    seen: dict[str, Values] = {name: [1.0 + 0.1 * place] for place, name in enumerate("abcde", start=1)}
    says(gradient_law.check(seen, law), FALSIFIED, "e 0.5, d 0.4, c 0.3 and 2 more")


def test_distance_takes_any_nesting_and_nothing_else() -> None:
    class Array:
        def tolist(self) -> list[list[float]]:
            return [[1.0, 2.0], [3.0, 4.0]]

    assert flat(Array()) == flat([[1, 2], [3, 4]]) == [1.0, 2.0, 3.0, 4.0]
    for wrong in ("12", [None], ["1"]):
        with pytest.raises(TypeError, match="not a number"):
            flat(wrong)  # type: ignore[arg-type]


def test_distance_does_not_overflow() -> None:
    found = gap([2e200, 0.0], [1e200, 0.0])
    assert (found.relative, found.factor) == (1.0, 2.0)
    assert gap([0.0], [0.0]).relative == 0.0
    assert common_factor({}) is None


@pytest.mark.parametrize(
    ("ratio", "factors", "expected"),
    [
        (4.0, {"world": 2, "accumulation": 2}, "4.000 = accumulation 2 x world 2"),
        (2.0, {"world": 2, "accumulation": 2}, "2.000 = accumulation 2 or world 2"),
        (3.0, {"world": 3, "accumulation": 2}, "3.000 = world 3"),
        (1 / 3, {"world": 3, "accumulation": 2}, "0.333 = 1 / world 3"),
        (1.5, {"world": 3, "accumulation": 2}, "1.500 = world 3 / accumulation 2"),
        (9.0, {"world": 3}, "9.000 = world 3 squared"),
        (0.25, {"world": 2, "accumulation": 1}, "0.250 = 1 / world 2 squared"),
        (-2.0, {"world": 2}, "-2.000 = -1 x world 2"),
        (-1.0, {"world": 2}, "-1.000 = the sign"),
        (1.0, {"world": 2}, "1.000"),
        (1.0, {"world": 2, "accumulation": 2}, "1.000"),
        (1.35, {"world": 2}, "1.350"),
        (5.0, {}, "5.000"),
        (0.0, {"world": 2}, "0"),
        (1e-5, {"world": 2}, "1e-05"),
        (math.nan, {"world": 2}, "nan"),
    ],
)
def test_ratios_in_words(ratio: float, factors: dict[str, int], expected: str) -> None:
    assert explain_ratio(ratio, factors) == expected
