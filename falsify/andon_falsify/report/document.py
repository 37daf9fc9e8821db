"""A report as a JSON file: exact, strict, and looked through when it is read, since it may come from anywhere."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import EnumType
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from andon.console.problems import InputError, Problem, ProblemList
from andon.run.atomic import write_whole
from andon_falsify.campaign.findings import SCHEMA, Finding, Report


@dataclass(frozen=True)
class _Expected:
    """How a file states one entry of `Report.expected`."""

    subject: str
    claim: str
    reason: str


_REQUIRED = ("schema", "started", "findings", "runs")
_NAMES = {str: "text", int: "a whole number", float: "a number or null"}


def write_json(report: Report, path: Path) -> None:
    """Write `report` to `path`, whole or not at all. Raises `InputError` where that cannot be written."""
    write_whole(path, json_bytes(report))


def json_bytes(report: Report) -> bytes:
    """`report` as UTF-8. Half of a surrogate pair, as in a file name that is no UTF-8, is a JSON escape."""
    text = json.dumps(report.to_json(), indent=2, allow_nan=False, ensure_ascii=False)
    return f"{text}\n".encode("utf-8", "backslashreplace")


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
    return _report(plain, str(path))


def _refuse(literal: str) -> None:
    """Raise for NaN and the infinities, which are Python's and not JSON's."""
    msg = f"{literal} is no number of JSON"
    raise ValueError(msg)


def _report(plain: object, name: str) -> Report:
    if not isinstance(plain, dict):
        raise InputError([Problem(name, f"holds {reprlib.repr(plain)}, not a report")])
    if plain.get("schema") != SCHEMA:
        found = reprlib.repr(plain.get("schema"))
        raise InputError([Problem(name, f"is not a report of schema {SCHEMA}: its schema is {found}")])
    problems = ProblemList()
    for where, what in _misfits(plain):
        problems.add(name, f"{where} {what}")
    problems.raise_if_any()
    for number, found in enumerate(plain["findings"]):
        try:
            Finding.from_json(found)
        except ValueError as error:
            problems.add(name, f"findings[{number}] contradicts itself: {error}")
    problems.raise_if_any()
    return Report.from_json(plain)


def _misfits(plain: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Place and fault of everything in `plain` whose type is not that of the report's field."""
    kinds = get_type_hints(Report) | {"expected": tuple[_Expected, ...]}
    for name, kind in kinds.items():
        if name in plain:
            yield from _unlike(plain[name], kind, name)
        elif name in _REQUIRED:
            yield name, "is missing"


def _unlike(value: object, kind: Any, where: str) -> Iterator[tuple[str, str]]:
    """Place and fault of everything in `value`, plain JSON, that is not of the type `kind`."""
    origin = get_origin(kind)
    if origin is UnionType:
        if value is not None:
            yield from _unlike(value, next(each for each in get_args(kind) if each is not type(None)), where)
    elif origin is tuple:
        yield from _unlike_list(value, get_args(kind)[0], where)
    elif origin is not None and issubclass(origin, Mapping):
        yield from _unlike_mapping(value, get_args(kind)[1], where)
    elif is_dataclass(kind):
        yield from _unlike_object(value, kind, where)
    elif isinstance(kind, EnumType):
        allowed: list[str] = [member.value for member in kind]  # type: ignore[var-annotated]
        if value not in allowed:
            yield where, f"is {reprlib.repr(value)}, none of {', '.join(allowed)}"
    elif not _is_plain(value, kind):
        yield where, f"is {reprlib.repr(value)}, not {_NAMES[kind]}"


def _is_plain(value: object, kind: type) -> bool:
    if kind is float:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return isinstance(value, kind) and not isinstance(value, bool)


def _unlike_list(value: object, kind: Any, where: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, list):
        yield where, f"is {reprlib.repr(value)}, not a list"
        return
    for number, each in enumerate(value):
        yield from _unlike(each, kind, f"{where}[{number}]")


def _unlike_mapping(value: object, kind: Any, where: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield where, f"is {reprlib.repr(value)}, not an object"
        return
    for name, each in value.items():
        yield from _unlike(each, kind, f"{where}.{name}")


def _unlike_object(value: object, kind: Any, where: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield where, f"is {reprlib.repr(value)}, not an object"
        return
    kinds = get_type_hints(kind)
    for each in fields(kind):
        if each.name in value:
            yield from _unlike(value[each.name], kinds[each.name], f"{where}.{each.name}")
        elif each.default is MISSING and each.default_factory is MISSING:
            yield f"{where}.{each.name}", "is missing"
