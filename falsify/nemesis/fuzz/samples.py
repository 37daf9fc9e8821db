"""Well-formed inputs, which the fuzzer damages."""

from __future__ import annotations

import functools
import importlib
import json
import random
from collections.abc import Callable
from functools import cache
from io import BytesIO

from andon.config.load import to_yaml
from andon.config.schema import Config
from andon.data.conversations import Message
from andon.run.summary import Head, Summary
from andon_contracts.fields import Part, Real
from andon_contracts.liveness.diagnosis import Position
from andon_contracts.liveness.halt import Counts, Progress, RankWarning
from andon_contracts.liveness.store_link import parse_strict
from andon_contracts.record import GENESIS, End, Plan, RankPart, Record, Start, Step, StepDigests, chain, encode
from andon_contracts.violation import Cause
from andon_falsify.report.document import json_bytes
from andon_falsify.report.findings import Finding, Report
from andon_falsify.verdict import Counterexample, Outcome

_TEXTS = ("one good day", 'a "quoted", comma', "ünïcödé ☃", "line\\n in it", "0", "x" * 300)


def _records() -> list[tuple[str, str]]:
    return [(f"{text} {number}", "yes" if number % 2 else "no") for number, text in enumerate(_TEXTS * 2)]


def _lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _delimited(delimiter: str) -> bytes:
    lines = [delimiter.join(("text", "label"))]
    lines += [delimiter.join(('"' + text.replace('"', '""') + '"', label)) for text, label in _records()]
    return "\r\n".join(lines).encode() + b"\r\n"


def _parquet() -> tuple[tuple[str, bytes], ...]:
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
    ("rows.jsonl", _lines(*({"id": n, "text": text, "label": label} for n, (text, label) in enumerate(_records())))),
    ("rows.csv", _delimited(",")),
    ("rows.tsv", _delimited("\t")),
    *_parquet(),
)


TALK = (
    Message("system", "be brief"),
    Message("user", "one good day"),
    Message("assistant", "ünïcödé ☃"),
    Message("user", 'a "quoted", comma'),
    Message("assistant", "0", 0.5),
)
_ROW = {"messages": [{"role": each.role, "content": each.content} for each in TALK]}
_WEIGHED = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0.5}]}
_PAIR = {"prompt": "what", "completion": "that", "id": 7}
_TEXT = {"text": "as it is", "source": "a book"}


CONVERSATION_FILES = (
    ("rows.jsonl", _lines(_ROW, _WEIGHED, _ROW)),
    ("rows.jsonl", _lines(_PAIR, {**_PAIR, "id": 8})),
    ("rows.json", _lines(_TEXT, _TEXT)),
    ("rows.csv", b'prompt,completion\r\n"a, ""b""",c\r\nd,"e\nf"\r\n'),
)
_BY_PREFIXES = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
_BY_MARKS = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>"
    "{% endgeneration %}{% else %}{{ m['content'] | trim }}{% endif %}{% endfor %}"
)
_DATED = (
    "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{% for m in messages %}"
    "{{ raise_exception('odd') if m.role == 'tool' }}{{ '[' ~ m.role ~ ']' ~ m.content ~ eos_token }}{% endfor %}"
    "{{ '[assistant]' if add_generation_prompt }}"
)
TEMPLATES = (_BY_PREFIXES, _BY_MARKS, _DATED)


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


def run_files() -> dict[str, bytes]:
    """The files in the folder of a run of three updates, without its provenance."""
    return {
        "ledger.jsonl": b"".join(_run(3)),
        "config.yaml": to_yaml(Config()).encode(),
        "summary.json": summary_file(),
        ".lock": b'{"andon_run": 1}\n',
    }


@cache
def messages() -> tuple[tuple[bytes, Callable[[object], object]], ...]:
    """Messages between ranks, each with its parser."""
    cause = Cause("violation", "they differ", 1, 3, "replicas-agree", "they differ", "w", (1,))
    progress = Progress(Position(1, "before the update", 0.5, 1), Counts(3, 2, "world", 1))
    return (
        (_bytes(cause), lambda body: parse_strict(Cause, body).checked(2)),
        (_bytes(progress), lambda body: parse_strict(Progress, body)),
        (_bytes(RankWarning(1, "text")), lambda body: parse_strict(RankWarning, body)),
    )


def _bytes(part: Part) -> bytes:
    return json.dumps(part.to_json()).encode()


@cache
def report_file() -> bytes:
    example = Counterexample("it is another", "step 3, rank 1", "1.0", "1.5", 1.5, "3 / 2", 1, "again")
    law = functools.partial(
        Finding, "gradient-law", version=1, subject="ddp", subject_version="1", backend="gloo", world=2, accumulation=1
    )
    findings = (
        law(Outcome.HOLDS, checked=3),
        law(Outcome.FALSIFIED, checked=3, counterexamples=(example,)),
        law(Outcome.UNKNOWN, ("because",)),
        law(Outcome.NOT_APPLICABLE, ("because",)),
    )
    return json_bytes(Report("2026-01-02T03:04:05Z", findings=findings, statements={"gradient-law": "is the law"}))


@cache
def summary_file() -> bytes:
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
