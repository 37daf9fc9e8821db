"""A report as a JSON file, and back: exact, strict, and looked through when read, since it may come from anywhere.

Names are those of the fields of `Report` and `Finding`. What is not finite is null: JSON knows neither NaN nor Inf.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Container, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum, EnumType
from math import isfinite, nan
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from andon.console.messages import InputError, Problem, ProblemList
from andon.run.atomic import write_whole
from andon_falsify.campaign.findings import SCHEMA, Report


@dataclass(frozen=True)
class _Expected:
    subject: str
    claim: str
    reason: str


_FIRST = ("schema", "started", "versions", "machine", "runs")
_REQUIRED = ("schema", "started", "findings", "runs")
_NAMES = {str: "text", int: "a whole number", float: "a number or null"}


def write_json(report: Report, path: Path) -> None:
    """Write `report` to `path`, whole or not at all. Raises `InputError` where that cannot be written."""
    write_whole(path, json_bytes(report))


def json_bytes(report: Report) -> bytes:
    """`report` as UTF-8. Half of a surrogate pair, as in a file name that is no UTF-8, is a JSON escape."""
    text = json.dumps(to_plain(report), indent=2, allow_nan=False, ensure_ascii=False)
    return f"{text}\n".encode("utf-8", "backslashreplace")


def to_plain(report: Report) -> dict[str, Any]:
    """`report` as JSON has it."""
    expected = [_Expected(subject, claim, reason) for (subject, claim), reason in report.expected.items()]
    plain: dict[str, Any] = _plain(vars(report) | {"expected": expected})
    return dict.fromkeys(_FIRST) | plain


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if is_dataclass(value):
        return _plain(vars(value))
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, Mapping) else value


def read_json(path: Path) -> Report:
    """The report in the file `path`.

    Raises `InputError` for a file that cannot be read, is no JSON or no report of this schema, with every problem.
    """
    try:
        plain = json.loads(path.read_bytes(), parse_constant=_refuse)
    except OSError as error:
        raise InputError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error
    except (ValueError, RecursionError) as error:
        raise InputError([Problem(str(path), f"is not JSON: {error}")]) from error
    return from_plain(plain, str(path))


def _refuse(literal: str) -> None:
    msg = f"{literal} is no number of JSON"
    raise ValueError(msg)


def from_plain(plain: object, name: str) -> Report:
    """What `to_plain` made; `name` is what problems call its source. Fields of a later time are passed over.

    Raises `InputError` with every problem.
    """
    if not isinstance(plain, dict):
        raise InputError([Problem(name, f"holds {reprlib.repr(plain)}, not a report")])
    if plain.get("schema") != SCHEMA:
        found = reprlib.repr(plain.get("schema"))
        raise InputError([Problem(name, f"is not a report of schema {SCHEMA}: its schema is {found}")])
    reading = _Reading()
    kinds = get_type_hints(Report) | {"expected": tuple[_Expected, ...]}
    entries = reading.named(plain, kinds, _REQUIRED, "")
    for faults in (reading.misfits, reading.contradictions):
        problems = ProblemList()
        for where, what in faults:
            problems.add(name, f"{where} {what}")
        problems.raise_if_any()
    expected = {(each.subject, each.claim): each.reason for each in entries.pop("expected", ())}
    return Report(**entries, expected=expected)


@dataclass
class _Reading:
    """Makes values of the types of fields from plain JSON, and notes place and fault of what is none.

    misfits: what is missing or of another type; it is read as None. contradictions: what has the right types and is
    refused by its class.
    """

    misfits: list[tuple[str, str]] = field(default_factory=list)
    contradictions: list[tuple[str, str]] = field(default_factory=list)

    def named(
        self, plain: Mapping[str, Any], kinds: Mapping[str, Any], required: Container[str], place: str
    ) -> dict[str, Any]:
        """What `plain` has under the names of `kinds`, each as its kind."""
        found = {}
        for name, kind in kinds.items():
            if name in plain:
                found[name] = self._read(plain[name], kind, f"{place}{name}")
            elif name in required:
                self.misfits.append((f"{place}{name}", "is missing"))
        return found

    def _read(self, value: Any, kind: Any, where: str) -> Any:
        origin, inner = get_origin(kind), get_args(kind)
        if origin is UnionType:
            own = next(each for each in inner if each is not type(None))
            return None if value is None else self._read(value, own, where)
        if origin is tuple:
            if not isinstance(value, list):
                return self._misfit(value, "not a list", where)
            return tuple(self._read(each, inner[0], f"{where}[{number}]") for number, each in enumerate(value))
        if origin is not None or is_dataclass(kind):
            if not isinstance(value, dict):
                return self._misfit(value, "not an object", where)
            if is_dataclass(kind):
                return self._made(value, kind, where)
            return {name: self._read(each, inner[1], f"{where}.{name}") for name, each in value.items()}
        if isinstance(kind, EnumType):
            allowed: list[str] = [member.value for member in kind]  # type: ignore[var-annotated]
            return kind(value) if value in allowed else self._misfit(value, f"none of {', '.join(allowed)}", where)
        if kind is float and value is None:
            return nan
        fits = isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)
        return value if fits else self._misfit(value, f"not {_NAMES[kind]}", where)

    def _made(self, value: Mapping[str, Any], kind: Any, where: str) -> Any:
        required = {each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING}
        before = len(self.misfits)
        found = self.named(value, get_type_hints(kind), required, f"{where}.")
        try:
            return kind(**found) if len(self.misfits) == before else None
        except ValueError as error:
            self.contradictions.append((where, f"contradicts itself: {error}"))

    def _misfit(self, value: Any, what: str, where: str) -> None:
        self.misfits.append((where, f"is {reprlib.repr(value)}, {what}"))
