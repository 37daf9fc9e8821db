"""What a violation left, put in words: a bundle that `watch` wrote, or the ledger of a run (issue 3 item 4)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from andon.config.source import is_folder
from andon.inspection.parts import explain_parts
from andon.inspection.recorded import open_recorded
from andon.problems import InputError, Problem
from andon_contracts.clauses import CLAUSES
from andon_contracts.record import Broken

_ENDS = {"failed": "failed", "out of memory": "ran out of memory", "died": "died", "hangs": "hangs", "left": "left"}
_SHOWN = 300


def explain(path: Path) -> Iterator[str]:
    """Lines on each violation in the bundle (a folder of `CLAUSE.json`, or one of these) or run at `path`.

    Raises `InputError` where there is none, or what is there is no bundle.
    """
    folder = is_folder(path)
    if path.suffix == ".json" and path.is_file():
        yield from _bundle(path)
        return
    files = sorted(path.glob("*.json")) if folder and not (path / "ledger.jsonl").exists() else []
    for file in files:
        yield from _bundle(file)
    if not files:
        yield from _run(path)


def _run(path: Path) -> Iterator[str]:
    found = open_recorded(path)
    broken = [record for record in found.records if isinstance(record, Broken)]
    if not broken:
        raise InputError([Problem(str(path), "its ledger has no violation to explain")])
    # Only the trainer's own run folder holds what a step can be done again from.
    repeatable = found.folder is not None and (found.start is None or found.start.writer is None)
    for record in broken:
        yield from _lines(record.to_json(), record.details, {})
        yield f"  look     andon show {path} --step {record.step}"
        if record.step > 1 and repeatable:
            yield f"  repeat   andon replay {path} --steps {record.step - 1}"


def _bundle(path: Path) -> Iterator[str]:
    body = _json(path)
    try:
        version = body["record"].pop("v")
        record = Broken.from_json(body["record"], version=version)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        problem = f"is no bundle: it has no record of a violation ({error})"
        raise InputError([Problem(str(path), problem)]) from error
    yield from _lines(record.to_json(), record.details, body)
    yield from explain_parts(path.with_suffix(""), record.tensor)
    for name, value in sorted(_mapping(body.get("versions")).items()):
        yield f"  {name}: {_short(value)}"


def _json(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error
    except (ValueError, RecursionError) as error:
        raise InputError([Problem(str(path), f"is no bundle: {error}")]) from error
    return _mapping(body)


def _mapping(found: object) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _lines(body: Mapping[str, Any], details: Mapping[str, Any], scene: Mapping[str, Any]) -> Iterator[str]:
    """What was broken, what it promises, and where; `scene` is what a bundle says besides its record."""
    clause = CLAUSES.get(body["clause"])
    cause = scene.get("cause", "violation")
    yield (
        f"{body['clause']} broken at step {body['step']}"
        if cause == "violation"
        else f"no violation: a rank {_ENDS.get(cause, cause)}, at step {body['step']}"
    )
    if clause is not None:
        yield f"  promise  {clause.statement}"
        yield f"  source   {', '.join([clause.source, *clause.aliases])}"
        yield f"  checked  {clause.schedule}"
    of = f" of {scene['world']}" if scene.get("world") else ""
    yield f"  ranks    {' '.join(map(str, body.get('ranks') or ())) or 'not attributable'}{of}"
    if body.get("tensor"):
        yield f"  where    {body['tensor']}{', ' + scene['element'] if scene.get('element') else ''}"
    yield f"  seen     {body['seen']}"
    for name in ("before", "likely"):
        if scene.get(name):
            yield f"  {name:<8} {scene[name]}{'  [inference, not proof]' if name == 'likely' else ''}"
    for name, value in details.items():
        yield f"  digests  {name}: {_short(value)}"
    if "applied" in scene:
        before = "not applied yet, and the loop went on" if scene.get("goes_on") else "not applied"
        yield f"  state    step {body['step']} was {'applied' if scene['applied'] else before}"
    if scene.get("last_equal") is not None:
        yield f"  equal    last at step {scene['last_equal']}"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
