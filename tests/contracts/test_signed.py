"""Who reaches the ranks' store and does not know their secret can say nothing there, whatever is well-formed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from andon_contracts.causes import Cause
from andon_contracts.liveness.diagnosis import Told
from andon_contracts.liveness.process import Process
from andon_contracts.liveness.signed import Signed, drawn, secret_in, words_of
from andon_contracts.liveness.store_link import Heartbeats

SECRET, OTHER = bytes(32), bytes(31) + b"\1"
LIES = (b"", b"1", b"-", b"\xff" * 70, b"0" * 64, b"0" * 64 + b"1")


def boards() -> tuple[Any, Signed]:
    store = HashStore()
    return store, Signed(store, SECRET)


def test_what_a_rank_puts_is_there() -> None:
    store, mine = boards()
    theirs = Signed(store, SECRET)
    mine.set("left 1", "1")
    assert (theirs.get("left 1"), theirs.check(["left 1"]), theirs.multi_get(["left 1"])) == (b"1", True, [b"1"])
    assert theirs.compare_set("pulled", "", "first") == b"first"
    assert mine.compare_set("pulled", "", "second") == b"first"
    assert mine.compare_set("pulled", b"first", "second") == b"second"
    assert theirs.read("left 1", lambda body: body) == 1
    assert mine.checked.dropped + theirs.checked.dropped == 0


@pytest.mark.parametrize("lie", LIES)
def test_a_value_without_the_secret_is_not_there(lie: bytes) -> None:
    store, mine = boards()
    Signed(store, OTHER).set("other", "1")
    mine.set("left 2", "1")
    lies = [lie, store.get("other"), store.get("left 2")]
    for each in lies:
        store.set("left 1", each)
        for _ in range(2):
            assert not mine.check(["left 1"])
            assert mine.get("left 1") == b""
            assert mine.multi_get(["left 1", "left 2"]) == [b"", b"1"]
            assert mine.read("left 1", lambda body: body) is None
    assert mine.checked.dropped == len([each for each in lies if each not in (b"", b"-")])


@pytest.mark.parametrize("lie", [lie for lie in LIES if lie])
def test_the_first_value_is_put_in_the_place_of_a_lie(lie: bytes) -> None:
    store, mine = boards()
    store.set("pulled", lie)
    assert mine.compare_set("pulled", "", "first") == b"first"
    assert Signed(store, SECRET).compare_set("pulled", "", "second") == b"first"


def test_what_is_taken_away_keeps_nobody_waiting() -> None:
    """A name that was there is not there: no call waits for it, where torch's own would."""
    store, mine = boards()
    for key in ("beat 0", "beat 1"):
        mine.set(key, key)
    store.delete_key("beat 1")
    assert (mine.get("beat 1"), mine.check(["beat 1"])) == (b"", False)
    assert mine.multi_get(["beat 0", "beat 1"]) == [b"beat 0", b""]
    assert not store.check(["beat 1"])


def test_an_old_sign_of_life_is_not_heard_again() -> None:
    store, mine = boards()
    theirs, beats = Heartbeats(Signed(store, SECRET), 1, Told, mine.checked), Heartbeats(mine, 0, Told, mine.checked)
    kept = []
    for step in (1, 2):
        theirs.tell(Told(1, step, "update", waits=False, since_s=0.0, phase_s=0.0))
        kept.append(store.get("beat 1"))
        assert beats.hear([1])[1].told.step == step
    store.set("beat 1", kept[0])
    assert (beats.hear([1])[1].told.step, mine.checked.dropped) == (2, 1)
    theirs.tell(Told(1, 3, "update", waits=False, since_s=0.0, phase_s=0.0))
    assert beats.hear([1])[1].told.step == 3


def test_a_well_formed_lie_is_no_beat_and_no_cause() -> None:
    store, mine = boards()
    sign = {"number": 9, "process": Process.here().to_json(), "told": Told(1, 2, "update").to_json()}
    store.set("beat 1", json.dumps(sign))
    store.set("pulled", json.dumps(Cause("died", "rank 1 of 2 died.", 1, 2, ranks=(1,)).to_json()))
    assert Heartbeats(mine, 0, Told, mine.checked).hear([1]) == {}
    assert mine.read("pulled", Cause.from_json) is None
    assert mine.checked.dropped == 2


def test_a_secret_is_gathered_as_integers() -> None:
    secret = drawn()
    arrived = {name: value - (1 << 64) * (value >> 63) for name, value in words_of(secret).items()}
    assert secret_in(arrived) == secret != drawn()
