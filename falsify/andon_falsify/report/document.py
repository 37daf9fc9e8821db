"""A report as a JSON file, and back. Reading is strict, since the file may come from anywhere.

Names are those of the fields of `Report` and `Finding`. NaN and infinity are written as null, which JSON has.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from andon.console.messages import InputError, Problem, ProblemList, reading, shown
from andon.run.atomic import write_whole
from andon_falsify.report.findings import SCHEMA, Report

_REPORT = TypeAdapter(Report)


def write_json(report: Report, path: Path) -> None:
    """Write `report` to `path`, whole or not at all. Raises `InputError` if the file cannot be written."""
    write_whole(path, json_bytes(report))


def json_bytes(report: Report) -> bytes:
    """`report` as UTF-8. A lone surrogate, as in a file name that is not UTF-8, is written out as `\\udc80`."""
    return json.dumps(_plain(asdict(report)), indent=2, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_plain(name): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def read_json(path: Path) -> Report:
    """The report in the file `path`. Raises `InputError` with every problem of the file."""
    with reading(path):
        text = path.read_bytes()
    return parse(text, str(path))


def parse(text: bytes, name: str) -> Report:
    """The report that `json_bytes` wrote. Unknown fields are ignored. Raises `InputError` with every problem."""
    try:
        plain = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InputError([Problem(name, f"is not a report of andon falsify --json: {error}")]) from error
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
        found = plain.get("schema") if isinstance(plain, dict) else plain
        raise InputError([Problem(name, f"is not a report of schema {SCHEMA}: its schema is {shown(found)}")])
    try:
        return _REPORT.validate_json(text, strict=True)
    except ValidationError as error:
        problems = ProblemList()
        for where, what in misfits(error):
            problems.add(name, f"{where} {what}")
        problems.raise_if_any()
        raise


def _refuse(literal: str) -> None:
    msg = f"JSON does not have the number {literal}"
    raise ValueError(msg)


def misfits(error: ValidationError) -> list[tuple[str, str]]:
    """Where values do not fit, and why: `findings[0].outcome`, `must be ..., not 'maybe'`."""
    found = []
    for each in error.errors():
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in each["loc"]).removeprefix(".")
        what = (
            each["msg"]
            .replace("Input should be", "must be")
            .replace("String should match pattern", "must match")
            .replace("Value error, ", "")
        )
        found.append((where, "is missing" if each["type"] == "missing" else f"{what}, not {shown(each['input'])}"))
    return found
