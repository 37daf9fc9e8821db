"""A violation put in words, from what it left: a bundle that `watch` wrote, or the ledger of a run (issue 3 item 4).

Files are read as JSON and as plain bytes of tensors; nothing in them is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from andon.config.source import is_folder
from andon.console.problems import InputError, Problem
from andon.inspection.recorded import open_recorded
from andon_contracts.clauses import CLAUSES
from andon_contracts.record import Broken
from andon_contracts.stacks import pending
from andon_contracts.tensor_file import read_tensors

_ENDS = {"failed": "failed", "out of memory": "ran out of memory", "died": "died", "hangs": "hangs", "left": "left"}
_SHOWN = 300
_MOST_IDS = 16
_MOST_FRAMES = 6
_MOST_TENSORS = 8
_MOST_BYTES = 1 << 28


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
    yield from _of_ranks(path.with_suffix(""), record.tensor)
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
    """Lines on the broken clause: its promise, and where; `scene` is what a bundle says besides its record."""
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


def _of_ranks(folder: Path, tensor: str) -> Iterator[str]:
    """Each rank's batch and where it was, from the `rank-R.json` in `folder`, and how copies of `tensor` differ."""
    parts = {path: _read(path) for path in sorted(folder.glob("rank-*.json"), key=_number) if path.stem.count(".") == 0}
    for path, part in parts.items():
        if isinstance(part, str):
            yield f"  {path.stem:<8} cannot be read: {part}"
            continue
        yield from _of_rank(folder, part)
    yield from _differences([part for part in parts.values() if isinstance(part, dict)], folder, tensor)


def _number(path: Path) -> tuple[int, str]:
    digits = path.stem.removeprefix("rank-").partition(".")[0]
    return (int(digits) if digits.isdecimal() else 0, path.name)


def _read(path: Path) -> dict[str, Any] | str:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return str(error)
    return found if isinstance(found, dict) else "it is no object"


def _of_rank(folder: Path, part: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"  rank {part.get('rank')}   process {part.get('pid')} on {part.get('host')}, step {part.get('step')}, "
        + ", ".join(str(part[name]) for name in ("point", "doing") if part.get(name))
    )
    ids = part.get("ids") or []
    if ids:
        more = f" and {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else ""
        yield f"    batch       rows {' '.join(map(str, ids[:_MOST_IDS]))}{more}"
    for thread in part.get("threads") or []:
        frames = thread.get("frames") or []
        if thread.get("main"):
            yield from (f"    {'stack' if not i else '':<11} {frame}" for i, frame in enumerate(frames[-_MOST_FRAMES:]))
        else:
            yield f"    thread      {thread.get('name')}: {frames[-1] if frames else 'no Python'}"
    yield from _state(part)
    yield from _collectives(folder, part)


def _state(part: Mapping[str, Any]) -> Iterator[str]:
    tensors = part.get("tensors")
    if isinstance(tensors, dict):
        left_out = tensors.get("left out") or []
        limit = f"; {len(left_out)} left out, over {tensors.get('limit bytes')} bytes" if left_out else ""
        yield f"    state       {len(part.get('digests') or ())} tensors in {tensors.get('file')} (safetensors){limit}"
    else:
        yield f"    state       {tensors or 'none: this rank was elsewhere when it learned of it'}"


def _collectives(folder: Path, part: Mapping[str, Any]) -> Iterator[str]:
    said = str(part.get("collectives", "not available"))
    record = None if said.startswith("not available") else _read(folder / Path(said).name)
    if not isinstance(record, dict):
        yield f"    collectives {said if record is None else record}"
        return
    entries = [entry for entry in record.get("entries") or [] if isinstance(entry, dict)]
    yield from (f"    collectives {line}" for line in pending(entries, 3))


def _differences(parts: list[dict[str, Any]], folder: Path, tensor: str) -> Iterator[str]:
    """Which tensors differ between ranks by their digests; of the broken one also in how many elements, and how far."""
    digests = {part["rank"]: part["digests"] for part in parts if isinstance(part.get("digests"), dict)}
    names = dict.fromkeys(name for known in digests.values() for name in known)
    odd = [name for name in names if len({known.get(name) for known in digests.values()}) > 1]
    # Each rank has the gradients and buffers of its own rows, until they are reduced: they say nothing by themselves.
    for name in odd[:_MOST_TENSORS]:
        yield f"  differs  {name}{_how_far(folder, list(digests), name) if tensor in name else ''}"
    if len(odd) > _MOST_TENSORS:
        yield f"  differs  and {len(odd) - _MOST_TENSORS} more"


def _how_far(folder: Path, ranks: list[int], name: str) -> str:
    copies = {}
    for rank in ranks:
        path = folder / f"rank-{rank}.safetensors"
        try:
            if path.stat().st_size <= _MOST_BYTES:
                copies[rank] = read_tensors(path)[name].flatten()
        except (OSError, ValueError, KeyError):
            continue
    if len(copies) < 2 or len({copy.shape for copy in copies.values()}) > 1:
        return ""
    stacked = torch.stack([copy.view(torch.uint8).view(copy.numel(), -1) for copy in copies.values()])
    elements = int((stacked != stacked[0]).any(0).any(-1).sum())
    values = torch.stack([copy.double() for copy in copies.values()])
    spread = float((values.amax(0) - values.amin(0)).max())
    return f": {elements} of {values.shape[1]} elements, by up to {spread:g}"
