"""Well-formed inputs to start from: whatever is damaged was right before."""

from __future__ import annotations

import importlib
import json
import random
from functools import cache
from io import BytesIO

from andon.run.summary import Head, Summary
from andon_contracts.fields import Real
from andon_contracts.record import GENESIS, End, Plan, RankPart, Record, Start, Step, StepDigests, chain, encode

_TEXTS = ("one good day", 'a "quoted", comma', "ünïcödé ☃", "line\\n in it", "0", "x" * 300)


def _records() -> list[tuple[str, str]]:
    return [(f"{text} {number}", "yes" if number % 2 else "no") for number, text in enumerate(_TEXTS * 2)]


def _json_lines() -> bytes:
    rows = [{"id": number, "text": text, "label": label} for number, (text, label) in enumerate(_records())]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _delimited(delimiter: str) -> bytes:
    lines = [delimiter.join(("text", "label"))]
    lines += [delimiter.join(('"' + text.replace('"', '""') + '"', label)) for text, label in _records()]
    return "\r\n".join(lines).encode() + b"\r\n"


def _parquet() -> tuple[tuple[str, bytes], ...]:
    """A Parquet file, where its library is installed."""
    try:
        arrow = importlib.import_module("pyarrow")
        arrow_parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        return ()
    texts, labels = zip(*_records(), strict=True)
    out = BytesIO()
    arrow_parquet.write_table(arrow.table({"text": list(texts), "label": list(labels)}), out)
    return (("rows.parquet", out.getvalue()),)


DATA_FILES: tuple[tuple[str, bytes], ...] = (
    ("rows.jsonl", _json_lines()),
    ("rows.csv", _delimited(",")),
    ("rows.tsv", _delimited("\t")),
    *_parquet(),
)


def _digest(number: int) -> str:
    return f"{number:016x}"


@cache
def _run(steps: int) -> tuple[bytes, ...]:
    """The lines of a run of `steps` updates of two rows each, on two ranks."""
    plan = Plan(rows=2 * steps, batch_size=2, micro_batches=2, seed=3, epochs=1, steps=steps)
    records: list[Record] = [Start("r", {"torch": "2"}, "0" * 64, plan, {"weights": _digest(100)}, 2, "gloo")]
    for number in range(1, steps + 1):
        ids = 2 * number - 2, 2 * number - 1
        digests = StepDigests(*(_digest(10 * number + part) for part in range(1, 5)))
        ranks = tuple(
            RankPart(rank, (rank,), (row,), digests.weights, digests.gradient, digests.optimizer)
            for rank, row in enumerate(ids)
        )
        loss = Real.of(1.0 / number)
        records.append(Step(number, 0, ids[0], ids, 2, Real.of(0.5), loss, Real.of(2.0), 1, 2, "gloo", digests, ranks))
    records.append(End(steps, "finished", {"weights": _digest(10 * steps + 3)}))
    lines: list[bytes] = []
    for seq, record in enumerate(records):
        lines.append(encode(record, seq, chain(lines[-1]) if lines else GENESIS))
    return tuple(lines)


def ledger_lines(draw: random.Random) -> list[bytes]:
    """The lines of a ledger of one to six updates, each with its line feed."""
    return list(_run(draw.randint(1, 6)))


@cache
def summary_file() -> bytes:
    """The summary of a run."""
    found = Summary(
        run="r",
        finished=True,
        reason="finished",
        steps=2,
        world_size=2,
        backend="gloo",
        weights_digest=_digest(1),
        initial_weights_digest=_digest(2),
        contracts={"finite": 4},
        violations=0,
        wall_s=1.5,
        ledger=Head(4, _digest(3)),
        fingerprint={"torch": "2"},
        final_loss=Real.of(0.25),
        eval={"accuracy": 0.5},
    )
    return json.dumps(found.to_json()).encode()
