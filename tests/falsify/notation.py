"""Histories written down in a line, so that each fault has a smallest history that shows it; and what is said of one.

    history("start rows=4 steps=2 | 1: 0[a b] 1[c d] w=7,7 loss=0.5 | violation finite step=2")

Segments are separated by `|`. A step is `NUMBER:` and then, in any order:
  `0[a b]`      rank 0 used rows a and b (digits are integers); `0@0,1[a b]` names its leaves as well
  `w=7,8`       digest of the weights on each rank, padded to 16 characters; `o=` optimizer, `g=` gradient, `-` for none
  `ids=a,b`     the global batch, where it is not the ranks' rows in order; `count=2`, `correct=1`, `epoch=1`
  `loss=0.5`    likewise `lr=`, `norm=`; `nan` and `inf` are allowed
  `d=5`         digest of the content; `world=2`, `backend=gloo`
What is left out: every digest is one that all ranks share and that differs from step to step, epoch 0, loss 1.
Other segments are a kind and its fields: `start rows=4 w=7` (w is the initial weights), `resume step=2`, `end`. Two
are no lines but accidents: `torn` cuts the line before it short, `garbage` is a line that is no JSON.
The text goes through the same reader as a ledger, and the lines are linked into a chain.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from andon_falsify.history import History, RowId, chain_digest, read_lines
from andon_falsify.history.events import VERSION
from andon_falsify.verdict import Outcome, Verdict

HOLDS, FALSIFIED, UNKNOWN, INAPPLICABLE = Outcome.HOLDS, Outcome.FALSIFIED, Outcome.UNKNOWN, Outcome.NOT_APPLICABLE
_RANK = re.compile(r"(\d+)(?:@([\d,]+))?\[([^\]]*)\]")
_DIGESTS = {"w": "weights", "o": "optimizer", "g": "gradient"}
_PLAN = frozenset({"rows", "ids", "batch_size", "micro_batches", "seed", "epochs", "steps"})
_NUMBERS = {"loss": "loss", "lr": "lr", "norm": "grad_norm"}


def history(text: str, name: str = "history", *, world: int | None = None, backend: str = "inline") -> History:
    """The history that `text` writes down; `world` and `backend` are what each step line says of them."""
    return read_lines(ledger_lines(text, world, backend), name)


def ledger_lines(text: str, world: int | None = None, backend: str = "inline") -> list[bytes]:
    lines: list[bytes] = []
    prev = "0" * 16
    for segment in (part.strip() for part in text.split("|") if part.strip()):
        if segment == "torn":
            lines[-1] = lines[-1][: len(lines[-1]) // 2]
            continue
        if segment == "garbage":
            body = b"{not json"
        else:
            fields = _fields(segment, world, backend)
            body = json.dumps({"v": VERSION, "seq": len(lines), "prev": prev, **fields}).encode()
        lines.append(body + b"\n")
        prev = chain_digest(body)
    return lines


def told(checker: Any, read: str | History, outcome: Outcome, *words: str, **given: Any) -> None:
    says(checker.check_history(history(read) if isinstance(read, str) else read, **given), outcome, *words)


def says(verdict: Verdict, outcome: Outcome, *words: str) -> None:
    assert verdict.outcome is outcome, verdict
    assert [word for word in words if word not in str(verdict)] == [], verdict


def _fields(segment: str, world: int | None, backend: str) -> dict[str, object]:
    head, _, rest = segment.partition(" ")
    if head.endswith(":"):
        return _step(int(head[:-1]), rest, world, backend)
    fields: dict[str, object] = {"kind": head}
    settings = dict(_settings(rest, segment))
    if head == "start":
        fields["plan"] = {key: _plain(settings.pop(key), key) for key in sorted(_PLAN & settings.keys())}
        if "w" in settings:
            fields["initial"] = {"weights": _digest(settings.pop("w"))}
    return fields | {key: _plain(value, key) for key, value in settings.items()}


def _step(number: int, rest: str, world: int | None, backend: str) -> dict[str, object]:
    shares = _RANK.findall(rest)
    settings = dict(_settings(_RANK.sub("", rest), rest))
    ranks: list[dict[str, object]] = [
        {"rank": int(rank), "leaves": [int(leaf) for leaf in leaves.split(",") if leaf], "ids": _rows(rows.split())}
        for rank, leaves, rows in shares
    ]
    for short, long in _DIGESTS.items():
        given = settings.pop(short, f"{short}{number}").split(",")
        given = given * len(ranks) if len(given) == 1 else given
        if len(given) != max(len(ranks), 1) and ranks:
            msg = f"{len(given)} digests {short}= for {len(ranks)} ranks in {rest!r}"
            raise ValueError(msg)
        for entry, digest in zip(ranks, given, strict=False):
            entry[long] = "" if digest == "-" else _digest(digest)
    used = _rows([row for _, _, rows in shares for row in rows.split()])
    ids = _rows(settings.pop("ids").split(",")) if "ids" in settings else used
    digests: dict[str, object] = {long: ranks[0][long] for long in _DIGESTS.values()} if ranks else {}
    digests["content"] = _digest(settings.pop("d", f"d{number}"))
    fields: dict[str, object] = {"kind": "step", "step": number, "epoch": 0, "ids": ids, "count": len(ids)}
    fields |= {"world": len(ranks) if world is None else world, "backend": backend, "digests": digests, "ranks": ranks}
    for short, long in _NUMBERS.items():
        value = float(settings.pop(short, "1"))
        fields[long] = {"value": value if math.isfinite(value) else None, "hex": value.hex()}
    return fields | {key: _plain(value, key) for key, value in settings.items()}


def _settings(text: str, whole: str) -> list[tuple[str, str]]:
    pairs = []
    for token in text.split():
        key, equals, value = token.partition("=")
        if not (key and equals):
            msg = f"{token!r} in {whole!r} is neither a rank's rows nor key=value"
            raise ValueError(msg)
        pairs.append((key, value))
    return pairs


def _rows(tokens: list[str]) -> list[RowId]:
    return [int(token) if token.isdigit() else token for token in tokens if token]


def _plain(value: str, key: str) -> object:
    if key == "ids":
        return _rows(value.split(","))
    return int(value) if value.isdigit() else value


def _digest(text: str) -> str:
    return text.rjust(16, "0")
