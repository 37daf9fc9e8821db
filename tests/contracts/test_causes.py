"""What an error means for the other ranks: told apart, and whole when it reaches them."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError

from andon_contracts.causes import Cause, consequence, first_line, kind_of
from andon_contracts.liveness.end_messages import POINTS, Teller, Whereabouts
from andon_contracts.violation import Finding, Halted, Violation

GLOO = "[/x/gloo/transport/tcp/"


def _raised(work: object) -> BaseException:
    try:
        work()  # type: ignore[operator]
    except BaseException as error:  # noqa: BLE001 - whatever torch raises is looked at
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), "out of memory"),
        (_raised(lambda: torch.empty(1 << 60, dtype=torch.uint8)), "out of memory"),
        (OSError(12, "Cannot allocate memory"), "out of memory"),
        (ValueError("out of memory"), "failed"),
        (RuntimeError("shape mismatch"), "failed"),
        (Violation("x", clause="finite"), "violation"),
        (Halted("x", cause="died"), "died"),
    ],
)
def test_an_error_of_the_ranks_own(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind
    assert consequence(error) is None


def test_what_anybody_wrote_does_not_act_on_a_terminal() -> None:
    assert first_line(ValueError("bad row \x1b]0;t\x07\u202e\nmore")) == "ValueError: bad row \\x1b]0;t\\x07\\u202e"


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (RuntimeError(GLOO + "pair.cc:553] Connection closed by peer [127.0.0.1]:1"), "lost"),
        (RuntimeError(GLOO + "unbound_buffer.cc:78] Timed out waiting 5000ms for recv"), "silent"),
        (DistNetworkError("failed to recv, got 0 bytes"), "lost"),
        (DistBackendError("NCCL communicator was aborted on rank 1"), "lost"),
        (RuntimeError("Connection closed by peer, says a data base"), None),
        (RuntimeError(GLOO + "pair.cc:1] something of its own"), None),
    ],
)
def test_an_error_that_another_rank_caused(error: BaseException, meaning: str | None) -> None:
    assert consequence(error) == meaning


def test_a_cause_travels_whole() -> None:
    finding = Finding("nan", 7, (0, 2), "lora.A")
    sent = Cause.of_violation(Violation("the message", clause="finite", finding=finding, bundle="b/7"), 2)
    found = Cause.from_json(json.loads(json.dumps(sent.to_json()))).among(3)
    assert found == sent
    error = pickle.loads(pickle.dumps(found.violation()))
    assert type(error) is Violation
    assert (str(error), error.clause, error.finding, error.bundle) == ("the message", "finite", finding, "b/7")
    for body in (None, [], {"kind": "died"}, {"nothing": 1, "ranks": []}, {"kind": "bored", "text": "x"}):
        with pytest.raises(ValueError, match=r"must be|missing|unknown"):
            Cause.from_json(body)
    with pytest.raises(ValueError, match="names rank 2 of 2"):
        sent.among(2)


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        (
            Teller(1, 4, Whereabouts(3, POINTS[1])).failed(ValueError("boom"), "train.py:7 in loop"),
            "rank 1 of 4 failed at step 3, in its forward or backward pass, which is no violation: ValueError: boom.",
        ),
        (
            Teller(1, 4, Whereabouts(3, POINTS[2])).failed(MemoryError(), ""),
            "rank 1 of 4 ran out of memory at step 3, at its update, which is no violation: MemoryError.",
        ),
        (
            Teller(0, 4, Whereabouts(9)).left(3, Whereabouts(9, POINTS[0])),
            (
                "rank 3 of 4 left at step 9, before its forward pass, which is no violation: "
                "it closed its watch, or ended, while the others went on."
            ),
        ),
        (
            Teller(0, 4, Whereabouts(9)).behind(3, Whereabouts(9, POINTS[0], 31.2)),
            (
                "rank 3 of 4 hangs at step 9, before its forward pass, which is no violation: its process runs, but "
                "the others waited for it until their timeout; it passed no hook for 31 s."
            ),
        ),
    ],
)
def test_each_end_has_its_own_words(cause: Cause, line: str) -> None:
    assert cause.text.splitlines()[0] == line
    assert type(cause.violation()) is Halted
    assert cause.violation().cause == cause.kind


def test_the_cord_pulled_by_hand_is_a_violation() -> None:
    """A user who stops the run says that something must not be."""
    cause = Teller(1, 4, Whereabouts(3, POINTS[0], last_equal=2)).pulled("a row twice")
    assert cause.text.splitlines() == [
        "rank 1 of 4 pulled the cord at step 3, before its forward pass: a row twice.",
        "  state    last state known equal: step 2",
    ]
    assert type(cause.violation()) is Violation


def test_a_rank_is_at_least_where_the_others_let_it_be() -> None:
    told = Whereabouts(3, POINTS[2], 0.5, last_equal=2)
    assert told.at_least(Whereabouts(8, POINTS[1], last_equal=7)) == Whereabouts(8, "", last_equal=7)
    assert told.at_least(Whereabouts(3, POINTS[1], last_equal=2)) == told
