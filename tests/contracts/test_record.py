"""The ledger line: records survive it to the bit, a wrong line is refused, the chain finds what changed."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon_contracts.fields import Real
from andon_contracts.record import (
    GENESIS,
    KINDS,
    MAX_LINE,
    Broken,
    End,
    Evaluation,
    Plan,
    RankPart,
    Record,
    Resume,
    Retraction,
    Saved,
    Start,
    Step,
    StepDigests,
    chain,
    decode_line,
    encode,
)
from andon_falsify.history.events import StepEvent, parse_line

H = ["0123456789abcdef", "f" * 16, "00000000000000a1", "1" * 16]
STEP = Step(
    step=3,
    epoch=0,
    position=64,
    ids=(5, 9, 2),
    count=3,
    lr=Real.of(1e-3),
    loss=Real.of(0.1),
    grad_norm=Real.of(2.0),
    correct=2,
    world=2,
    backend="gloo",
    digests=StepDigests(content=H[0], gradient=H[1], weights=H[2], optimizer=H[3]),
    ranks=(
        RankPart(rank=0, leaves=(0, 1), ids=(5, 9), weights=H[2]),
        RankPart(rank=1, leaves=(2,), ids=(2,), weights=H[2], gradient=H[1], optimizer=H[3]),
    ),
)
WATCHED = replace(
    STEP,
    epoch=None,
    position=None,
    count=None,
    loss=None,
    grad_norm=None,
    correct=None,
    digests=StepDigests(None, H[1], H[2], H[3]),
    ranks=(RankPart(rank=0, leaves=(), ids=(), weights=None),),
    weights_norm=Real.of(0.5),
    gradient_at="optimizer",
    optimizer_index=1,
    skipped=True,
)
SEEN = replace(WATCHED, digests=StepDigests(None, None, None, None), tensors={"weights": "3/weights"})
SEEN_PLAN = Plan(2, 4, 2, 0, 1, 3, ids=(0, 1))
RECORDS: list[Record] = [
    Start("r1", {"torch": "2.13"}, H[0], Plan(10, 4, 2, 0, 1, 3), {"weights": H[1]}, 2, "gloo"),
    STEP,
    Evaluation(3, 0, 10, {"accuracy": Real.of(0.5), "auroc": Real.of(math.nan)}, H[3]),
    Evaluation(3, None, 10, {"rmse": Real.of(0.5)}),
    Saved(3, "step-00000003", H[2], best=True),
    Resume(3, H[0], {"torch": "2.13"}, {"weights": H[1]}, 1, "inline", "step-00000003", torn=17),
    Resume(0, H[0], {}, {}, 1, "inline"),
    Broken("finite", 4, (1,), "lora_A\n\u884c\ud800", "NaN", {"loss": "nan"}),
    Broken("finite", 4, (1,), "", "NaN", action="warned"),
    Start("r1", {}, H[0], Plan(10, None, None, None, None, None), {}, 2, "gloo", "watch"),
    WATCHED,
    Start("r1", {}, "", SEEN_PLAN, {}, 2, "gloo", "witness", {"weights": "sha256"}),
    Resume(2, "", {}, {}, 2, "gloo", writer="witness", algorithms={"weights": "sha256"}),
    SEEN,
    Retraction(2, 3, "base-frozen", "other weights"),
    End(3, "finished", {"weights": H[1]}, Real.of(-0.0), 0),
]


def chained(records: list[Record]) -> list[bytes]:
    lines: list[bytes] = []
    for record in records:
        lines.append(encode(record, len(lines), chain(lines[-1]) if lines else GENESIS))
    return lines


@pytest.mark.parametrize("record", RECORDS, ids=range(len(RECORDS)))
def test_every_kind_survives_its_line(record: Record) -> None:
    assert decode_line(encode(record, 7, H[0]), 7, H[0]) == record


def test_every_kind_is_tried() -> None:
    expected = {"start", "step", "eval", "checkpoint", "resume", "violation", "retraction", "end"}
    assert {r.kind for r in RECORDS} == set(KINDS) == expected


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_reals_survive_to_the_bit(value: float) -> None:
    text = json.dumps(Real.of(value).to_json(), allow_nan=False)
    read = Real.from_json(json.loads(text))
    assert read == Real.of(value)
    if not math.isnan(value):
        assert struct.pack("d", read.value) == struct.pack("d", value)


def test_reals_compare_bits() -> None:
    """0.0 and -0.0 are different reals; NaN equals NaN, so that a repeated NaN is the same record."""
    assert Real.of(0.0) != Real.of(-0.0)
    assert Real.of(math.nan) == Real.of(-math.nan)


@pytest.mark.parametrize(
    "data",
    [
        {"value": 1.0, "hex": (2.0).hex()},
        {"value": None, "hex": (2.0).hex()},
        {"value": 1.0, "hex": "nan"},
        {"value": 1.0, "hex": "0x1p0"},
        {"value": 10**400, "hex": (2.0).hex()},
        {"value": True, "hex": (1.0).hex()},
        {"value": 1.0, "hex": 1},
        {"value": 1.0},
        {"value": 1.0, "hex": (1.0).hex(), "more": 1},
        {"value": 0.0, "hex": "0x1p99999"},
        1.0,
    ],
)
def test_a_real_that_contradicts_itself_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="real must be"):
        Real.from_json(data)


def edited(**changes: object) -> bytes:
    data = json.loads(encode(STEP, 0, GENESIS)) | changes
    return json.dumps({name: value for name, value in data.items() if value is not None}).encode()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (edited(v=6), "version 6 of the ledger format is not supported, only 5"),
        (edited(v=4), "version 4"),
        (edited(v=True), "version True"),
        (edited(kind="stop"), "unknown kind of record 'stop'"),
        (edited(kind=["step"]), "unknown kind"),
        (edited(seq=-1), "seq must be"),
        (edited(seq=None), "seq must be"),
        (edited(prev="0"), "prev must be"),
        (edited(lr=None), "lr is missing"),
        (edited(lr=0.1), "lr must be"),
        (edited(extra=1), "unknown field 'extra'"),
        (edited(ids=[1, "2"]), r"ids\[1\] must be"),
        (edited(ids=[1, True]), r"ids\[1\] must be"),
        (edited(ids=3), "ids must be a list"),
        (edited(count=2**63), "count must be"),
        (edited(backend=3), "backend must be a str"),
        (edited(digests={"weight": H[0]}), "digests has the unknown field 'weight'"),
        (edited(ranks=[{"rank": 0, "leaves": [], "ids": [], "weights": "F" * 16}]), r"ranks\[0\].weights must be"),
        (b"{", "not a line of JSON"),
        (b"", "not a line of JSON"),
        (b"\xff", "not a line of JSON"),
        (b"[]", "must be an object"),
        (b'{"v":2,"v":2}', "duplicate key 'v'"),
        (b'{"v":NaN}', "NaN is not JSON"),
        (b"[" * 100_000, "not a line of JSON"),
        (b'{"v":' + b"9" * 5000 + b"}", "not a line of JSON"),
        (b" " * (MAX_LINE + 1), "more than"),
    ],
    ids=range(27),
)
def test_a_wrong_line_is_refused(line: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        decode_line(line, 0, GENESIS)
    assert len(str(caught.value)) < 300


GOLDEN = (
    b'{"backend":"gloo","count":2,"digests":{"weights":"00000000000000a3"},"draws":"dropout in 0 (p = 0.25)",'
    b'"ids":[3,5],"kind":"step","loss":{"hex":"0x1.0000000000000p-1","value":0.5},"lr":'
    b'{"hex":"0x1.0000000000000p-3","value":0.125},"prev":"0000000000000000","ranks":[],"seq":0,"skipped":true,"step":1,"terms":7,"v":5,"world":1}\n'
)


def test_a_line_has_these_bytes_and_both_readers_take_it() -> None:
    record = decode_line(GOLDEN, 0, GENESIS)
    assert encode(record, 0, GENESIS) == GOLDEN
    event = parse_line(GOLDEN.decode(), 1, "")
    assert isinstance(record, Step)
    assert isinstance(event, StepEvent)
    assert (event.number, event.lr and event.lr.value) == (record.step, record.lr.value) == (1, 0.125)
    assert event.digests == {"weights": record.digests.weights} == {"weights": "00000000000000a3"}
    assert event.draws == record.draws == "dropout in 0 (p = 0.25)"
    assert (record.skipped, record.terms) == (True, 7)


@pytest.mark.parametrize(
    "changes", [{"ids": [1, 2]}, {"backend": 3}, {"step": -1}, {"lr": 0.1}, {"lr": None}, {"step": 1.0}]
)
def test_a_wrong_record_is_not_written(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be|missing|does not survive"):
        encode(replace(STEP, **changes), 0, GENESIS)  # type: ignore[arg-type]


def test_a_line_that_is_too_long_is_not_written() -> None:
    with pytest.raises(ValueError, match="more than"):
        encode(Broken("finite", 1, (), "", "x" * MAX_LINE), 0, GENESIS)


def test_chain_is_the_digest_of_the_line_before() -> None:
    lines = chained(RECORDS)
    assert json.loads(lines[0])["prev"] == "0" * 16
    for before, line in itertools.pairwise(lines):
        assert json.loads(line)["prev"] == hashlib.sha256(before[:-1]).hexdigest()[:16]
