"""The ranks' store: values without the secret, garbage, the thread that talks to the store."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from andon_contracts.fields import Part
from andon_contracts.liveness import store_link
from andon_contracts.liveness.diagnosis import Position, RankStatus
from andon_contracts.liveness.halt import Counts, HaltLink, Progress
from andon_contracts.liveness.process import Process
from andon_contracts.liveness.store_link import Beat, Heartbeats, SignedStore, StoreLink, StrictReader
from andon_contracts.violation import Cause

SECRET, OTHER = bytes(32), bytes(31) + b"\1"
LIES = (b"", b"1", b"-", b"\xff" * 70, b"0" * 64, b"0" * 64 + b"1")


def boards() -> tuple[Any, SignedStore]:
    store = HashStore()
    return store, SignedStore(store, SECRET)


def test_what_a_rank_puts_is_there() -> None:
    store, mine = boards()
    theirs = SignedStore(store, SECRET)
    mine.set("left 1", "1")
    assert (theirs.get("left 1"), theirs.check(["left 1"]), theirs.multi_get(["left 1"])) == (b"1", True, [b"1"])
    assert theirs.compare_set("pulled", "", "first") == b"first"
    assert mine.compare_set("pulled", "", "second") == b"first"
    assert mine.compare_set("pulled", b"first", "second") == b"second"
    assert theirs.read("left 1", lambda body: body) == 1
    assert mine.reader.dropped + theirs.reader.dropped == 0


@pytest.mark.parametrize("lie", LIES)
def test_a_value_without_the_secret_is_not_there(lie: bytes) -> None:
    store, mine = boards()
    SignedStore(store, OTHER).set("other", "1")
    mine.set("left 2", "1")
    lies = [lie, store.get("other"), store.get("left 2")]
    for each in lies:
        store.set("left 1", each)
        for _ in range(2):
            assert not mine.check(["left 1"])
            assert mine.get("left 1") == b""
            assert mine.multi_get(["left 1", "left 2"]) == [b"", b"1"]
            assert mine.read("left 1", lambda body: body) is None
    assert mine.reader.dropped == len([each for each in lies if each not in (b"", b"-")])


@pytest.mark.parametrize("lie", [lie for lie in LIES if lie])
def test_the_first_value_is_put_in_the_place_of_a_lie(lie: bytes) -> None:
    store, mine = boards()
    store.set("pulled", lie)
    assert mine.compare_set("pulled", "", "first") == b"first"
    assert SignedStore(store, SECRET).compare_set("pulled", "", "second") == b"first"


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
    theirs = Heartbeats(SignedStore(store, SECRET), 1, RankStatus, mine.reader)
    beats = Heartbeats(mine, 0, RankStatus, mine.reader)
    kept = []
    for step in (1, 2):
        theirs.send(RankStatus(1, step, "update", waits=False, since_s=0.0, phase_s=0.0))
        kept.append(store.get("beat 1"))
        assert beats.read([1])[1].status.step == step
    store.set("beat 1", kept[0])
    assert (beats.read([1])[1].status.step, mine.reader.dropped) == (2, 1)
    theirs.send(RankStatus(1, 3, "update", waits=False, since_s=0.0, phase_s=0.0))
    assert beats.read([1])[1].status.step == 3


def test_a_secret_is_gathered_as_integers() -> None:
    secret = store_link.new_secret()
    arrived = {name: value - (1 << 64) * (value >> 63) for name, value in store_link.secret_to_ints(secret).items()}
    assert store_link.secret_from_ints(arrived) == secret != store_link.new_secret()


# Garbage.

WORLD = 2
STATUS = RankStatus(3, 2, "update", waits=True, since_s=0.5, phase_s=0.75, place="x", ended="x", exit=1, paused_s=0.25)
PROGRESS = Progress(Position(2, "at its update", 0.5, 1), Counts(3, 2, "all", 1))
CAUSE = Cause("died", "rank 1 of 2 died.", 1, 2, ranks=(1,))


def listener(learned: list[Cause]) -> Any:
    def unguarded(thread: str, error: Exception) -> str:
        raise error

    return SimpleNamespace(learn=learned.append, progress=lambda: PROGRESS, warn=print, unguarded=unguarded)


def beat(told: Part) -> dict[str, Any]:
    found = {"number": 1, "process": Process.here().to_json(), "status": told.to_json()}
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def heard(form: type[Part], *values: bytes) -> tuple[Beat[Any] | None, int]:
    store, checked = HashStore(), StrictReader()
    beats = Heartbeats(store, 0, form, checked)  # type: ignore[arg-type]
    found: dict[int, Beat[Any]] = {}
    for value in values:
        store.set("beat 1", value)  # type: ignore[arg-type]
        found = beats.read([1])
    return found.get(1), checked.dropped


def pulled(value: bytes) -> tuple[list[Cause], int]:
    store, learned = HashStore(), list[Cause]()
    store.set("pulled", signature(value) + value)  # type: ignore[arg-type]
    link = HaltLink(SignedStore(store, SECRET), 0, WORLD, listener(learned))
    link.ask(lambda: None, 5.0)
    link.leave()
    return learned, link.reader.dropped


def signature(value: bytes) -> bytes:
    return store_link._signature(SECRET, "pulled", value).encode()


GARBAGE = {
    "bytes": b"\xff\xfe\x00",
    "cut": json.dumps(beat(STATUS)).encode()[:-20],
    "list": b"[]",
    "number": b"7",
    "null": b"null",
    "huge number": b"9" * 10_000,
    "deep list": b"[" * 200_000,
    "deep object": b'{"number":' * 100_000,
    "deep and closed": b"[" * 400 + b"]" * 400,
    "without ranks": b'{"kind": "died", "text": "x", "rank": 1, "step": 1}',
    "too long": json.dumps({**beat(STATUS), "number": "x" * (1 << 20)}).encode(),
    "UTF-16": json.dumps(beat(STATUS)).encode("utf-16"),
}


@pytest.mark.parametrize("value", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_dropped(value: bytes) -> None:
    for told in (STATUS, PROGRESS):
        good = json.dumps(beat(told)).encode()
        assert heard(type(told), value) == (None, 1)
        found, dropped = heard(type(told), good, value, value)
        assert found is not None
        assert (found.status, dropped) == (told, 1)
    assert pulled(value) == ([], 1)


def leaves(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for name, value in inside:
        yield (*path, name)
        yield from leaves(value, (*path, name))


def put(body: Any, path: tuple[Any, ...], value: object) -> Any:
    made = copy.deepcopy(body)
    at = made
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return made


WRONG = [None, True, -1, -0.5, 1 << 63, 10**400, math.nan, math.inf, [], {}, [[]], {"x": 1}]


@pytest.mark.parametrize("body", [beat(STATUS), beat(PROGRESS), CAUSE.to_json()], ids=["run", "watch", "cause"])
def test_a_value_of_a_wrong_type_or_out_of_range_is_dropped_wherever_it_stands(body: dict[str, Any]) -> None:
    body = json.loads(json.dumps(body))
    form = RankStatus if body.get("status") == beat(STATUS)["status"] else Progress

    def dropped(changed: Any) -> bool:
        raw = json.dumps(changed).encode()
        if "kind" in body:
            return StrictReader().read("", raw, lambda found: Cause.from_json(found).checked(WORLD)) is None
        return heard(form, raw) == (None, 1)

    for path in leaves(body):
        fine = put(body, path, body)  # the whole in the place of a part
        for value in (*WRONG, fine):
            there = body
            for name in path:
                there = there[name]
            legal = (there is True or there is False) and value is True
            legal = legal or (value == [] and isinstance(there, list))
            if not legal and value != there:
                assert dropped(put(body, path, value)), (path, value)
    assert dropped({**body, "more": 1})
    if "kind" in body:
        assert dropped({**body, "rank": WORLD})
        assert dropped({**body, "ranks": [0, WORLD]})
        assert dropped({**body, "clause": "../../etc"})


def test_a_field_that_is_missing_is_not_taken_for_its_default() -> None:
    for told in (STATUS, PROGRESS):
        for path in leaves(beat(told)):
            body = beat(told)
            at = body
            for name in path[:-1]:
                at = at[name]
            del at[path[-1]]
            if path[-1] != "last_equal":  # left out where there is none
                assert heard(type(told), json.dumps(body).encode()) == (None, 1), path
    for name in set(CAUSE.to_json()) - {"rank"}:
        body = CAUSE.to_json()
        del body[name]
        assert pulled(json.dumps(body).encode()) == ([], 1), name


def test_a_cause_is_told_where_garbage_stands() -> None:
    store, learned = HashStore(), list[Cause]()
    store.set("pulled", b"\xff garbage")  # type: ignore[arg-type]
    links = [HaltLink(SignedStore(store, SECRET), rank, WORLD, listener(learned)) for rank in range(WORLD)]
    links[0].publish(CAUSE)
    for link in links:
        link.ask(link._read_store, 5.0)
    assert learned == [CAUSE, CAUSE]
    store.set("pulled", "garbage again")
    links[1].ask(link._read_store, 5.0)
    assert json.loads(SignedStore(store, SECRET).get("pulled")) == CAUSE.to_json()
    for link in links:
        link.leave()


def test_a_cause_that_holds_what_no_form_takes_is_told_all_the_same() -> None:
    learned: list[Cause] = []
    link = HaltLink(SignedStore(HashStore(), SECRET), 0, WORLD, listener(learned))
    odd = Cause("violation", "x" * 3_000_000, 0, -1, "../../mine", ranks=(7, -1), tensor=object())  # type: ignore[arg-type]
    link.publish(odd)
    link.ask(lambda: None, 5.0)
    link.leave()
    assert [(found.kind, found.rank, found.clause) for found in learned] == [("violation", 0, "halt-together")]
    assert set(learned[0].text) == {"x"}
    assert link.reader.dropped == 0


# The thread that talks to the store.

PAUSE_S = 600.0  # between two rounds, in seconds; a test that waits this long runs into its time limit


def test_a_link_that_is_closed_ends_without_another_pause_or_round() -> None:
    rounds: list[int] = []
    said: list[str] = []
    first = threading.Event()

    def routine() -> float:
        rounds.append(1)
        first.set()
        return PAUSE_S

    link = StoreLink("link", routine, lambda error: None)
    assert first.wait(PAUSE_S)
    link.close(lambda: said.append("last"), 2 * PAUSE_S)
    assert (said, rounds) == (["last"], [1])
