"""What a ratio equals: told from several cases where one cannot tell, with the mistake that gives it."""

from __future__ import annotations

import pytest

from andon_falsify.campaign.diagnosis import diagnosed, explain, held_by_rest, reason
from andon_falsify.campaign.reasons import blame, condensed
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.verdict import Counterexample


def laid_out(world: int, accumulation: int, local: int = 2) -> Case:
    batch = world * accumulation * local
    return Case(rows=make_rows(2 * batch + 1), batch_size=batch, micro_batches=world * accumulation, world=world)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ([(4.0, (2, 2))], "4.000 = accumulation 2 x world 2: the loss was not divided"),
        ([(2.0, (2, 2))], "2.000 = accumulation 2 or world 2"),
        ([(2.0, (2, 2)), (3.0, (3, 2))], "2.000 = world 2: summed over the ranks instead of averaged"),
        (
            [(2.0, (2, 2)), (2.0, (3, 2))],
            "2.000 = accumulation 2: summed over the micro-batches of a rank instead of averaged",
        ),
        ([(0.5, (2, 2)), (1 / 3, (3, 2))], "0.500 = 1 / world 2: divided by the number of ranks once too often"),
        ([(8.0, (2, 2)), (12.0, (3, 2))], "8.000 = global batch 8: summed over the rows instead of averaged"),
        ([(-1.0, (2, 2))], "-1.000 = the sign"),
        ([(-2.0, (2, 1))], "-2.000 = -1 x world 2"),
        ([(1.37, (2, 2))], ""),
        ([(1.0, (2, 2))], ""),
        ([(2.0, (2, 2)), (-3.0, (3, 2))], ""),
        ([(float("nan"), (2, 2))], ""),
        ([], ""),
    ],
)
def test_ratios_are_explained_together(measured: list[tuple[float, tuple[int, int]]], said: str) -> None:
    pairs = [(ratio, laid_out(*place)) for ratio, place in measured]
    found = explain(pairs)
    shown = "" if found is None else found.of(*pairs[0])
    assert shown.startswith(said)
    assert bool(shown) == bool(said)


def test_what_a_judge_knows_of_a_ratio_stays_and_is_kept_by_a_smaller_case() -> None:
    equals = "0.500 = 1 of 2 micro-batches: a short window is divided as a full one"
    told = Counterexample("off the law", ratio=0.5, equals=equals)
    case = laid_out(2, 2)
    assert diagnosed(told, case, explain([(0.5, case)])) == told
    assert reason(told, case) == ("a short window is divided as a full one",)
    untold = Counterexample("off the law", ratio=0.5, equals="0.500 = 1 / world 2")
    assert diagnosed(untold, case, None).equals == "0.500 = 1 / accumulation 2 or 1 / world 2"
    assert reason(untold, case) == ("accumulation", "world")


def test_a_counterexample_is_explained_by_what_all_cases_say() -> None:
    two, three = laid_out(2, 2), laid_out(3, 2)
    common = explain([(2.0, two), (3.0, three)])
    assert "world 2" in diagnosed(Counterexample("off", ratio=2.0), two, common).equals
    assert "accumulation" not in diagnosed(Counterexample("off", ratio=2.0), two, common).equals
    assert diagnosed(Counterexample("off", ratio=4.0), two, common).equals.startswith(
        "4.000 = accumulation 2 x world 2"
    )
    plain = Counterexample("off")
    assert diagnosed(plain, two, common) is plain


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("the learning rate is another one", "2.000 = world size 2"),
        ("the loss that is told is another one", "2.000 = world size 2"),
        ("the norm of the weights after the update is another one", "2.000 = world size 2"),
        (
            "the norm of the reduced gradient is another one",
            "2.000 = world 2: summed over the ranks instead of averaged",
        ),
    ],
)
def test_only_of_a_gradient_a_sum_is_blamed(what: str, said: str) -> None:
    """A learning rate that is multiplied by the world size is summed by nobody."""
    assert diagnosed(Counterexample(what, ratio=2.0), laid_out(2, 1, 3), None).equals == said


def test_what_held_rules_causes_out() -> None:
    """Two ranks without accumulation are right, so the world is not it; a case with other rows says nothing."""
    case = laid_out(2, 2)
    held = case.but(micro_batches=2)
    for found in (
        diagnosed(Counterexample("off", ratio=2.0), case, explain([(2.0, case)], held_by_rest([held]))),
        diagnosed(Counterexample("off", ratio=2.0), case, None, held_by_rest([held])),
    ):
        assert found.equals == "2.000 = accumulation 2: summed over the micro-batches of a rank instead of averaged"
    stranger = held.but(rows=make_rows(3))
    assert (
        "accumulation 2 or world 2"
        in diagnosed(Counterexample("off", ratio=2.0), case, None, held_by_rest([stranger])).equals
    )


def test_a_smaller_case_must_keep_the_factors() -> None:
    found = Counterexample("off", ratio=4.0)
    assert reason(found, laid_out(2, 2)) == ("accumulation", "world")
    assert reason(Counterexample("off", ratio=2.0), laid_out(2, 1)) == ("world",)


def test_without_a_factor_a_smaller_case_must_keep_what_was_found() -> None:
    """But for numbers, lists of them, and the names of tensors, which another case has otherwise."""
    case = laid_out(2, 1)
    told = "layers.0.head is not where one step leads (of 2, 1 rows)"
    small, other = "layers.1.out is not where one step leads (of 3 rows)", "layers.0.head is frozen"
    reasons = [reason(Counterexample(what), case) for what in (told, small, other)]
    assert reasons[0] == reasons[1] != reasons[2]
    assert reason(Counterexample("off by 1.37", ratio=1.37), case) == ("off by #",)


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (
            {0: "RuntimeError: gloo: Connection closed by peer", 1: "the rank was killed by SIGKILL"},
            "rank 1 was killed",
        ),
        ({0: "no answer in time (5 s); killed", 1: "ArithmeticError: no\nTraceback"}, "rank 1: ArithmeticError: no"),
        ({0: "RuntimeError: Timed out waiting 20000ms", 1: "no answer in time (5 s); killed"}, "rank 1: no answer"),
        (
            {0: "ValueError: bad", 1: "RuntimeError: socket\nit left processes behind, now ended: 7 (x)"},
            "rank 0: ValueError: bad; rank 1: it left processes behind, now ended: 7 (x)",
        ),
        ({2: ""}, "rank 2: an error without a text"),
    ],
)
def test_the_cause_is_named_and_not_its_echo(errors: dict[int, str], said: str) -> None:
    """Who died or raised before who only noticed, or waited; what was left behind is said in any case."""
    assert blame(errors).startswith(said)
    assert "\n" not in blame(errors)


def test_the_place_of_an_error_is_that_in_the_subjects_own_code() -> None:
    text = (
        "LoopError: ValueError: bad\n"
        '  File "/x/andon_falsify/loops/duty.py", line 3, in train\n'
        '  File "/x/mine.py", line 12, in train\n'
        '  File "/x/site-packages/torch/nn.py", line 9, in forward\n'
    )
    assert blame({0: text}) == "rank 0: ValueError: bad at /x/mine.py:12 in train"


def test_reasons_that_differ_in_numbers_are_one() -> None:
    many = "largest relative error 4.1e-07, allowed 2e-05; largest relative error 5.4e-07, allowed 2e-05; a; b; c"
    assert condensed(many) == "largest relative error 5.4e-07, allowed 2e-05; a; b; and 1 more"
    assert condensed("") == ""
