"""A trial: one case and what is done with it. `written` is the text of `--case`, and `read_trial` reads it.

The text is JSON with the fields that differ from the default case, without backend, world size and accumulation, which
have options of their own. Rows that `make_rows` draws are written as `[how many, seed]`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from andon_falsify.report.document import misfits
from andon_falsify.subjects.case import Case, Rows, make_rows

LAW, HALT, RESUME, MEMORY = "law", "halt", "resume", "memory"
KINDS = (LAW, HALT, RESUME, MEMORY)
"""law: one run, compared with the reference and with one rank. halt: a run with a planted NaN. resume: a run that is
interrupted and resumed. memory: a run that counts bytes."""

_ROW_SEEDS = 64
_NOT_WRITTEN = ("world", "backend", "folder")
_OF_A_SCRIPT = "batch_size"
"""The only field that a script is given, apart from its layout: rows, model and optimizer are its own."""
_DRAWN = TypeAdapter(tuple[PositiveInt, NonNegativeInt])


@dataclass(frozen=True)
class Trial:
    """A case and what is done with it. seed: what it was drawn from. then_world: ranks of the run that resumes."""

    kind: Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
    case: Case
    seed: int = 0
    then_world: NonNegativeInt = 0

    @property
    def place(self) -> tuple[str, int, int]:
        """Backend, world size and accumulation."""
        return self.case.backend, self.case.world, self.case.accumulation

    @property
    def lacking(self) -> str:
        """What this machine lacks to run the trial, or ""."""
        from andon_falsify.subjects.placing import why_not

        return why_not(self.case.backend, max(self.case.world, self.then_world))

    @cached_property
    def written(self) -> str:
        """Everything but the place and the seed, as compact JSON."""
        case, plain = asdict(self.case), asdict(Case(micro_batches=self.case.world * self.case.accumulation))
        found: dict[str, Any] = {} if self.kind == LAW else {"kind": self.kind}
        if self.then_world:
            found["then_world"] = self.then_world
        names = [_OF_A_SCRIPT] if self.case.backend == "script" else [name for name in case if name not in _NOT_WRITTEN]
        found |= {name: case[name] for name in names if case[name] != plain[name]}
        if "rows" in found and (seed := _seed_of(self.case.rows)) is not None:
            found["rows"] = [len(self.case.rows), seed]
        return json.dumps(found, separators=(",", ":"))


def _seed_of(rows: Rows) -> int | None:
    return next((seed for seed in range(_ROW_SEEDS) if make_rows(len(rows), seed) == rows), None)


def read_trial(text: str, *, backend: str, world: int, accumulation: int, seed: int) -> Trial:
    """The trial that `Trial.written` wrote. Raises `ValueError` with everything that is wrong."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"is not JSON: {error}"
        raise ValueError(msg) from None
    if not isinstance(given, dict):
        msg = f"must be a JSON object, not {given!r}"
        raise ValueError(msg)
    place = {"backend": backend, "world": world}
    known = asdict(Case()).keys() - set(_NOT_WRITTEN)
    unknown = sorted(given.keys() - known - _OF_A_TRIAL)
    wrong = [f"a case has no {name!r}; it has {', '.join(sorted(known))}" for name in unknown]
    of_trial = {name: given.pop(name) for name in _OF_A_TRIAL & given.keys()}
    try:
        if isinstance(given.get("rows"), list):
            given["rows"] = asdict(make_rows(*_DRAWN.validate_python(given["rows"], strict=False)))
        case = {"micro_batches": world * accumulation, **given, **place}
        trial = _TRIAL.validate_json(json.dumps({"kind": LAW, "case": case, "seed": seed, **of_trial}), strict=True)
    except ValidationError as error:
        named = [(where.removeprefix("case."), what) for where, what in misfits(error)]
        wrong += [f"rows{where} {what}" if where[:1] in "[" else f"{where} {what}" for where, what in named]
    else:
        wrong += _contradictions(trial.case)
    if wrong:
        raise ValueError("; ".join(wrong))
    return trial


_TRIAL = TypeAdapter(Trial)
_OF_A_TRIAL = {"kind", "then_world"}


def _contradictions(case: Case) -> list[str]:
    rows, found = case.rows, []
    if not rows.labels or len(rows.tokens) != len(rows.labels) or not all(rows.tokens):
        found.append("rows need a label and at least one token each")
    if not all(0 <= label < rows.classes for label in rows.labels):
        found.append(f"labels of rows must be from 0 to {rows.classes - 1}")
    if case.hidden % case.heads:
        found.append(f"hidden {case.hidden} cannot be divided among {case.heads} heads")
    if case.class_weights is not None and len(case.class_weights) != rows.classes:
        found.append(f"{len(case.class_weights)} class_weights for {rows.classes} classes")
    if case.poison is not None and case.poison.leaf >= case.micro_batches:
        found.append(f"poison in micro-batch {case.poison.leaf}, but there are only {case.micro_batches}")
    if (longest := max(map(len, rows.tokens), default=0)) > case.longest:
        found.append(f"a row has {longest} tokens, but longest is {case.longest}")
    return found
