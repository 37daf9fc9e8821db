"""One thing to try on a subject, and how it is written down so that a command line repeats exactly it.

A case is written as JSON of its differences from the default case; world, accumulation and backend are options of their
own. Its rows are `[how many, seed]` where they are rows that the suite draws, and written out otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from andon_falsify.subjects.case import Case, Poison, Rows, make_rows

KINDS = LAW, HALT, RESUME, MEMORY = "law", "halt", "resume", "memory"
"""law: one run, judged by the reference and against one rank. halt: a run with a planted NaN. resume: cut and taken up.
memory: bytes are counted."""

_ROW_SEEDS = 64
_APART = ("world", "backend", "folder", "rows", "micro_batches")
"""Fields that are written in another way, or not at all."""
_OF_A_SCRIPT = "batch_size"
"""The one field that says something to a script, beside its place: it has its own rows, model and optimizer."""
_WHOLE = "a whole number"


@dataclass(frozen=True)
class Trial:
    """A case and what is done with it. seed: what it was drawn from. then_world: ranks of the run that takes up."""

    kind: str
    case: Case
    seed: int = 0
    then_world: int = 0

    @property
    def place(self) -> tuple[str, int, int]:
        """Backend, world size and accumulation."""
        return self.case.backend, self.case.world, self.case.accumulation

    @property
    def lacking(self) -> str:
        """What this machine lacks for it, "" if nothing."""
        from andon_falsify.subjects.placing import why_not

        return why_not(self.case.backend, max(self.case.world, self.then_world))

    def written(self) -> str:
        """All but the place and the seed, as compact JSON that `read_trial` reads."""
        return self._json

    @cached_property
    def _json(self) -> str:
        plain, case = Case(), self.case
        found: dict[str, Any] = {} if self.kind == LAW else {"kind": self.kind}
        if self.then_world:
            found["then_world"] = self.then_world
        script = case.backend == "script"
        if case.rows != plain.rows and not script:
            found["rows"] = _written_rows(case.rows)
        if case.micro_batches != case.world * case.accumulation:
            found["micro_batches"] = case.micro_batches
        for each in fields(Case):
            value = getattr(case, each.name)
            says = each.name == _OF_A_SCRIPT if script else each.name not in _APART
            if says and value != getattr(plain, each.name):
                found[each.name] = [value.step, value.leaf, value.kind] if isinstance(value, Poison) else value
        return json.dumps(found, separators=(",", ":"))


def read_trial(text: str, *, backend: str, world: int, accumulation: int, seed: int) -> Trial:
    """What `written` wrote, at a place. Raises `ValueError` with all that is wrong, in words."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"is not JSON: {error}"
        raise ValueError(msg) from None
    if not isinstance(given, dict):
        msg = f"must be a JSON object, not {given!r}"
        raise ValueError(msg)
    kind, then_world = given.pop("kind", LAW), given.pop("then_world", 0)
    wrong = [] if kind in KINDS else [f"kind must be one of {', '.join(KINDS)}, not {kind!r}"]
    if not _whole(then_world, least=0):
        wrong.append(f"then_world must be {_WHOLE} from 0, not {then_world!r}")
    changes: dict[str, Any] = {"micro_batches": world * accumulation}
    for name, value in given.items():
        try:
            changes[name] = _value(name, value)
        except ValueError as error:
            wrong.append(str(error))
    if not wrong:
        case = Case().but(backend=backend, world=world, **changes)
        wrong = _contradictions(case)
    if wrong:
        raise ValueError("; ".join(wrong))
    return Trial(kind, case, seed, then_world)


def _value(name: str, value: Any) -> Any:
    if name == "rows":
        return _read_rows(value)
    if name == "poison":
        return _read_poison(value)
    if name == "class_weights":
        return _read_weights(value)
    if name not in _RULES:
        msg = f"a case has no {name!r}; it has {', '.join(['rows', 'poison', 'class_weights', *_RULES])}"
        raise ValueError(msg)
    right, expected = _RULES[name]
    if not right(value):
        msg = f"{name} must be {expected}, not {value!r}"
        raise ValueError(msg)
    return value


def _whole(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _real(value: object, least: float = 0.0) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < float("inf")


def _or_none(right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or right(value)


_FROM_1, _FROM_0 = f"{_WHOLE} from 1", f"{_WHOLE} from 0"
_RULES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(
        ("batch_size", "micro_batches", "epochs", "layers", "hidden", "heads", "inner", "longest"), (_whole, _FROM_1)
    ),
    **dict.fromkeys(("max_steps", "stop_after", "checkpoint_every"), (_or_none(_whole), f"{_FROM_1}, or null")),
    **dict.fromkeys(("seed", "rank"), (lambda value: _whole(value, 0), _FROM_0)),
    **dict.fromkeys(("momentum", "weight_decay", "lr"), (_real, "a number from 0")),
    "clip_norm": (_or_none(_real), "a number from 0, or null"),
    "dropout": (lambda value: _real(value) and value < 1, "a number from 0 and below 1"),  # type: ignore[operator]
    "optimizer": (lambda value: value in ("sgd", "adamw"), "sgd or adamw"),
    "architecture": (lambda value: value in ("decoder", "encoder"), "decoder or encoder"),
    "fault": (_or_none(lambda value: isinstance(value, str)), "the name of a planted fault, or null"),
    **dict.fromkeys(("contracts", "values", "memory"), (lambda value: isinstance(value, bool), "true or false")),
}
"""What each plain field of a case may be, and how that is said."""


def _contradictions(case: Case) -> list[str]:
    found = []
    if case.hidden % case.heads:
        found.append(f"hidden {case.hidden} cannot be divided among {case.heads} heads")
    if case.class_weights is not None and len(case.class_weights) != case.rows.classes:
        found.append(f"{len(case.class_weights)} class_weights for {case.rows.classes} classes")
    if case.poison is not None and case.poison.leaf >= case.micro_batches:
        found.append(f"poison in micro-batch {case.poison.leaf}, but there are only {case.micro_batches}")
    longest = max(map(len, case.rows.tokens))
    if longest > case.longest:
        found.append(f"a row has {longest} tokens, but longest is {case.longest}")
    return found


def _written_rows(rows: Rows) -> Any:
    seed = _seed_of(rows)
    if seed is not None:
        return [len(rows), seed]
    return {"tokens": rows.tokens, "labels": rows.labels, "classes": rows.classes}


def _seed_of(rows: Rows) -> int | None:
    return next((seed for seed in range(_ROW_SEEDS) if make_rows(len(rows), seed) == rows), None)


def _read_rows(value: Any) -> Rows:
    if isinstance(value, list) and len(value) == 2 and _whole(value[0]) and _whole(value[1], least=0):
        return make_rows(*value)
    try:
        tokens = tuple(tuple(int(token) for token in row) for row in value["tokens"])
        labels, classes = tuple(int(label) for label in value["labels"]), int(value["classes"])
    except (TypeError, KeyError, ValueError):
        tokens, labels, classes = (), (), 0
    if not labels or len(tokens) != len(labels) or not all(tokens) or not all(0 <= each < classes for each in labels):
        msg = 'rows must be [how many, seed], or {"tokens": [[...], ...], "labels": [...], "classes": 3}'
        raise ValueError(msg)
    return Rows(tokens, labels, classes)


def _read_poison(value: Any) -> Poison | None:
    if value is None:
        return None
    kinds = ("nan", "inf", "gradient")
    right = isinstance(value, list) and len(value) == 3 and _whole(value[0]) and _whole(value[1], least=0)
    if not right or value[2] not in kinds:
        msg = f"poison must be [update, micro-batch, {' or '.join(kinds)}], not {value!r}"
        raise ValueError(msg)
    return Poison(*value)


def _read_weights(value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(map(_real, value)):
        msg = f"class_weights must be a list of numbers from 0, or null, not {value!r}"
        raise ValueError(msg)
    return tuple(map(float, value))
