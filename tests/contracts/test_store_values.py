"""Whatever anybody puts into the ranks' store: what is none of ours is dropped and counted, and ends nothing."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from andon_contracts.causes import Cause
from andon_contracts.fields import Part
from andon_contracts.liveness.diagnosis import Told
from andon_contracts.liveness.end_messages import Whereabouts
from andon_contracts.liveness.halt_link import HaltLink, Progress
from andon_contracts.liveness.pending_collectives import Counts
from andon_contracts.liveness.process import Process
from andon_contracts.liveness.signed import Signed, _signature
from andon_contracts.liveness.store_link import Beat, Checked, Heartbeats

WORLD = 2
SECRET = bytes(32)
TOLD = Told(3, 2, "update", waits=True, since_s=0.5, phase_s=0.75, place="train.py:7", ended="x", exit=1, paused_s=0.25)
PROGRESS = Progress(Whereabouts(2, "at its update", 0.5, 1), Counts(3, 2, "all", 1))
CAUSE = Cause("died", "rank 1 of 2 died.", 1, 2, ranks=(1,))


def _fails(error: Exception) -> str:
    raise error


def beat(told: Part) -> dict[str, Any]:
    found = {"number": 1, "process": Process.here().to_json(), "told": told.to_json()}
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def heard(form: type[Part], *values: bytes) -> tuple[Beat[Any] | None, int]:
    store, checked = HashStore(), Checked()
    beats = Heartbeats(store, 0, form, checked)  # type: ignore[arg-type]
    found: dict[int, Beat[Any]] = {}
    for value in values:
        store.set("beat 1", value)  # type: ignore[arg-type]
        found = beats.hear([1])
    return found.get(1), checked.dropped


def pulled(value: bytes) -> tuple[list[Cause], int]:
    store, learned = HashStore(), list[Cause]()
    store.set("pulled", signature(value) + value)  # type: ignore[arg-type]
    link = HaltLink(Signed(store, SECRET), 0, WORLD, learned.append, lambda: PROGRESS, print, _fails)
    link._link.ask(lambda: None, 5.0)
    link.leave()
    return learned, link.checked.dropped


def signature(value: bytes) -> bytes:
    return _signature(SECRET, "pulled", value).encode()


GARBAGE = {
    "bytes": b"\xff\xfe\x00",
    "cut": json.dumps(beat(TOLD)).encode()[:-20],
    "list": b"[]",
    "number": b"7",
    "null": b"null",
    "huge number": b"9" * 10_000,
    "deep list": b"[" * 200_000,
    "deep object": b'{"number":' * 100_000,
    "deep and closed": b"[" * 400 + b"]" * 400,
    "without ranks": b'{"kind": "died", "text": "x", "rank": 1, "step": 1}',
    "too long": json.dumps({**beat(TOLD), "number": "x" * (1 << 20)}).encode(),
    "UTF-16": json.dumps(beat(TOLD)).encode("utf-16"),
}


@pytest.mark.parametrize("value", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_dropped(value: bytes) -> None:
    for told in (TOLD, PROGRESS):
        good = json.dumps(beat(told)).encode()
        assert heard(type(told), value) == (None, 1)
        found, dropped = heard(type(told), good, value, value)
        assert found is not None
        assert (found.told, dropped) == (told, 1)
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


@pytest.mark.parametrize("body", [beat(TOLD), beat(PROGRESS), CAUSE.to_json()], ids=["run", "watch", "cause"])
def test_a_value_of_a_wrong_type_or_out_of_range_is_dropped_wherever_it_stands(body: dict[str, Any]) -> None:
    body = json.loads(json.dumps(body))
    form = Told if body.get("told") == beat(TOLD)["told"] else Progress

    def dropped(changed: Any) -> bool:
        raw = json.dumps(changed).encode()
        if "kind" in body:
            return Checked().read("", raw, lambda found: Cause.from_json(found).among(WORLD)) is None
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
    for told in (TOLD, PROGRESS):
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["number", "process", "told"]), inner),
    max_leaves=20,
)


@settings(max_examples=30)
@given(
    st.binary(max_size=200)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.integers(0, 400).map(lambda most: json.dumps(beat(TOLD)).encode()[:most])
)
def test_nothing_that_can_be_written_is_an_error(value: bytes) -> None:
    whole = value == json.dumps(beat(TOLD)).encode()
    for form in (Told, Progress):
        found, dropped = heard(form, value)
        assert (found is None) == (dropped == 1 or not value)
        assert found is None or whole
    assert Checked().read("", value, lambda body: Cause.from_json(body).among(WORLD)) is None


def test_a_cause_is_told_where_garbage_stands() -> None:
    store, learned = HashStore(), list[Cause]()
    store.set("pulled", b"\xff garbage")  # type: ignore[arg-type]
    links = [
        HaltLink(Signed(store, SECRET), rank, WORLD, learned.append, lambda: PROGRESS, print, _fails)
        for rank in range(WORLD)
    ]
    links[0].publish(CAUSE)
    for link in links:
        link._link.ask(link._routine, 5.0)
    assert learned == [CAUSE, CAUSE]
    store.set("pulled", "garbage again")
    links[1]._link.ask(link._routine, 5.0)
    assert json.loads(Signed(store, SECRET).get("pulled")) == CAUSE.to_json()
    for link in links:
        link.leave()


def test_a_cause_that_holds_what_no_form_takes_is_told_all_the_same() -> None:
    store, learned = HashStore(), list[Cause]()
    link = HaltLink(Signed(store, SECRET), 0, WORLD, learned.append, lambda: PROGRESS, print, _fails)
    odd = Cause("violation", "x" * 3_000_000, 0, -1, "../../mine", ranks=(7, -1), tensor=object())  # type: ignore[arg-type]
    link.publish(odd)
    link._link.ask(lambda: None, 5.0)
    link.leave()
    assert [(found.kind, found.rank, found.clause) for found in learned] == [("violation", 0, "halt-together")]
    assert set(learned[0].text) == {"x"}
    assert link.checked.dropped == 0
