"""The measurement of what a watch costs: that it compares like with like, and finds what it says."""

from __future__ import annotations

import pytest

from benchmarks.watch_cost import PIECES, WARM_UP, Shape, measure, median_interval, rows_of, timed_pieces
from tests.support.ranks import run_ranks

PAIRS = 4


def _measured(shape: Shape) -> tuple[dict[str, object], dict[str, list[float]]]:
    with timed_pieces() as spent:
        return measure(shape, PAIRS, spent), spent


@pytest.mark.parametrize("trained", ["full", "lora"])
def test_the_three_replicas_do_the_same_and_one_is_watched(trained: str) -> None:
    """All end with the same weights; the watch judged every one of its replica's steps and none of the others'."""
    shape = Shape(trained, width=16, layers=1, rows=2, length=4, told=trained == "lora")
    for outcome in run_ranks(2, _measured, shape):
        found, spent = outcome.get()
        assert found["same_weights_as_unwatched"]
        assert found["pairs"] == PAIRS
        assert found["trained_tensors"] == (14 if trained == "lora" else 20)
        # By the counts of the clauses in this run: 30 at each update, and 5 more where rows are told and weights are
        # frozen. What is evaluated once, at the opening, is less than one a step.
        evaluations = float(str(found["evaluations_per_step"]))
        assert int(evaluations) == (35 if trained == "lora" else 30)
        shown = {str(name): figure for name, figure in rows_of(found)}
        assert len(shown) == 9
        assert shown["watched - unwatched, of a processor"] == f"{found['processor_extra_ms']} ms"
        for name in PIECES:
            assert len(spent[name]) == WARM_UP + PAIRS + 1
            assert spent[name][-1] == 0.0
            assert (trained == "full" and "frozen" in name) or all(seconds > 0 for seconds in spent[name][:-1])


@pytest.mark.parametrize(("count", "places"), [(1, (0, 0)), (25, (7, 17)), (200, (85, 114))])
def test_the_interval_of_the_median_is_of_order_statistics(count: int, places: tuple[int, int]) -> None:
    """The ends are 0.98 times the root of their number away from the middle, whatever the order of the values."""
    values = [float((7 * place) % count) for place in range(count)]
    assert median_interval(values) == tuple(map(float, places))
