"""The laws of what a run leaves, each a row that trainer and watch read alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from andon_contracts.laws.law import Judgement, settle
from andon_contracts.laws.outcome import RESTORED, Restored
from andon_contracts.violation import Violation

WHOLE = Restored({"a": 1, "b": 2}, {"b": (2, 2), "a": (1, 1)}, 7)


def test_what_is_there_as_it_was_saved_is_whole() -> None:
    settle(Judgement(RESTORED, WHOLE))
    settle(Judgement(RESTORED, Restored({}, {}, 7)))


@pytest.mark.parametrize(
    ("found", "ranks", "tensor", "seen"),
    [
        ({"a": (1, 1)}, (), "b", "b was saved and is not there"),
        ({"a": (1, 3), "b": (2, 2)}, (1,), "a", f"(with digest {1:016x}, now {3:016x})"),
        ({"a": (4, 3), "b": (2, 2)}, (), "a", f"(with digest {1:016x}, now {4:016x}, {3:016x})"),
        ({"a": (1, 1), "b": (2, 2), "": (5, 5)}, (), "", " is there and was not saved"),
    ],
)
def test_what_is_not_as_it_was_saved_is_named(
    found: Mapping[str, tuple[int, ...]], ranks: tuple[int, ...], tensor: str, seen: str
) -> None:
    with pytest.raises(Violation) as caught:
        settle(Judgement(RESTORED, replace(WHOLE, found=found)))
    assert (caught.value.clause, caught.value.step) == ("checkpoint-whole", 7)
    assert (caught.value.finding.ranks, caught.value.tensor) == (ranks, tensor)
    assert seen in caught.value.finding.seen


def test_what_cannot_be_read_or_is_heard_of_is_said_of_its_rank() -> None:
    with pytest.raises(Violation, match="checkpoint-whole broken at step 7 on rank 0: it is cut") as caught:
        settle(Judgement(RESTORED, Restored({}, {}, 7, "it is cut", (0,))))
    assert caught.value.rank == 0
    with pytest.raises(Violation, match="checkpoint-whole broken at step 7: it is cut"):
        settle(Judgement(RESTORED, replace(WHOLE, fault="it is cut")))
