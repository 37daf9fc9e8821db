"""Explains a violation from a bundle that `watch` wrote or from the ledger of a run.

Bundles are untrusted: only JSON and tensor bytes are read, so no code in them runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from andon.config.source import is_folder, is_there
from andon.console.messages import InputError, command_line, did_you_mean, reading
from andon.inspection.recorded import open_recorded
from andon.run.ledger import shown
from andon_contracts.clauses import CLAUSES
from andon_contracts.legible import counted
from andon_contracts.record import Broken
from andon_contracts.untrusted import read_json, read_regular

_SHOWN, _MOST_IDS, _MOST_FRAMES, _MOST_TENSORS = 300, 16, 6, 8
_MOST_BYTES = 1 << 28


def explain(path: Path) -> Iterator[str]:
    """Lines on each violation in a bundle (a folder of `CLAUSE.json` files, or one of them) or run at `path`.

    For the folder of a watch, which holds bundles, three lines on each of them. If `path` does not exist but names a
    clause, the lines explain that clause. Raises `InputError` if no violation is found or the file cannot be read as a
    bundle.
    """
    if path.suffix == ".json" and path.is_file():
        yield from _bundle(path, named=True)
    elif not is_there(path):
        name = str(path)
        if name not in CLAUSES:
            raise InputError.at(name, f"no such run, bundle or clause{did_you_mean(name, CLAUSES)}")
        yield from (name, *CLAUSES[name].explanation())
    elif is_folder(path) and not (path / "ledger.jsonl").exists():
        files = sorted(path.glob("*.json"))
        for file in files:
            yield from _bundle(file)
        if not files:
            yield from _bundles_in(path)
    else:
        yield from _run(path)


def _run(path: Path) -> Iterator[str]:
    recorded = open_recorded(path)
    broken = [record for record in recorded.records if isinstance(record, Broken)]
    if not broken:
        raise InputError.at(path, "its ledger has no violation to explain")
    # Only a run folder of `andon train` can be replayed.
    repeatable = recorded.folder is not None and (recorded.start is None or recorded.start.writer is None)
    for record in broken:
        yield from _lines(record, {})
        yield f"  look     {command_line('andon', 'show', path, '--step', str(record.step))}"
        step = max((step for step in recorded.trajectory if step <= record.step), default=0)
        if step and repeatable:
            if step < record.step:
                yield f"           step {record.step} was not recorded; the last recorded step is {step}"
            yield f"  repeat   {command_line('andon', 'replay', path, '--steps', str(step))}"


def _bundles_in(folder: Path) -> Iterator[str]:
    files = sorted(folder.glob("[0-9]*/*.json"), key=lambda file: (len(file.parent.name), file))
    if not files:
        raise InputError.at(folder, "holds no run and no bundle: it has no ledger.jsonl and no STEP/CLAUSE.json")
    for file in files:
        try:
            headline, *rows = _lines(*_read_account(file))
        except InputError as error:
            yield str(error)
            continue
        seen = next(row for row in rows if row.startswith("  seen "))
        yield from (headline, shown(seen, _SHOWN), f"  explain  {command_line('andon', 'explain', file)}")


def _read_account(path: Path, *, named: bool = False) -> tuple[Broken, dict[str, Any]]:
    with reading(path, "is not a bundle"):
        body = _mapping(read_json(path, follow=named))
    try:
        del body["record"]["v"]
        return Broken.from_json(body["record"]), body
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise InputError.at(path, f"is not a bundle: it has no record of a violation ({error})") from error


def _bundle(path: Path, *, named: bool = False) -> Iterator[str]:
    record, body = _read_account(path, named=named)
    yield from _lines(record, body)
    yield from _of_ranks(path.with_suffix(""), record.tensor)
    versions, machine = _mapping(body.get("versions")), _mapping(body.get("environment"))
    listed = ", ".join(f"{name} {versions[name]}" for name in sorted(versions) if versions[name])
    yield f"  versions {shown(listed, _SHOWN)}"
    devices = ", ".join(map(str, _list(machine.get("devices")))) or machine.get("cpu")
    world = body.get("world")
    if isinstance(world, int) and devices:
        yield f"  device   {counted(world, 'rank')} on {shown(devices, _SHOWN)}"


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _lines(record: Broken, scene: Mapping[str, Any]) -> Iterator[str]:
    clause, step, cause = CLAUSES.get(record.clause), record.step, str(scene.get("cause", "violation"))
    at, world = f"at step {step}" if step else "at the start", scene.get("world")
    if record.action == "suspected" or scene.get("suspicion"):
        yield f"{record.clause} suspected {at} (a loop without a fault can look like this)"
    elif cause == "violation":
        yield f"{record.clause} broken {at}"
    else:
        yield f"no violation: a rank {'ran out of memory' if cause == 'out of memory' else cause}, {at}"
    if clause is not None:
        yield from list(clause.explanation())[2:]  # promise and checked; likely and try follow below
    ranks = ", ".join(map(str, record.ranks)) + f" of {world}" * bool(world)
    unknown = "they differ, and no majority shows which are wrong" if clause and clause.between_ranks else "all"
    yield f"  ranks    {ranks if record.ranks else unknown}"
    if record.tensor:
        element = f", {scene['element']}" if scene.get("element") else ""
        yield f"  where    {record.tensor}{element}"
    yield f"  seen     {record.seen}"
    if scene.get("before"):
        yield f"  before   {scene['before']}"
    likely = scene.get("likely", record.likely if record.likely is not None else clause and clause.likely)
    if likely:
        yield f"  likely   {likely}  [inference, not proof]"
    if clause and cause == "violation":
        yield f"  try      {clause.remedy}"
    for name, value in record.details.items():
        yield f"  digests  {name}: {shown(value, _SHOWN)}"
    if "applied" in scene:
        before = "not applied yet, and the loop went on" if scene.get("goes_on") else "not applied"
        yield f"  state    step {step} was {'applied' if scene['applied'] else before}"
    if scene.get("last_equal") is not None:
        yield f"  equal    last at step {scene['last_equal']}"


def _of_ranks(folder: Path, tensor: str) -> Iterator[str]:
    found = (path for path in folder.glob("rank-*.json") if path.stem.count(".") == 0)
    paths = sorted(found, key=lambda path: (len(path.name), path.name))
    digests: dict[Path, dict[str, Any]] = {}
    for path in paths:
        part = _read(path)
        if isinstance(part, str):
            yield f"  {path.stem:<8} cannot be read: {part}"
            continue
        yield from _of_rank(folder, part)
        if isinstance(part.get("digests"), dict):
            digests[path] = part["digests"]
    # Tensors whose digests differ between ranks; for the one in `tensor` also how many elements, and the spread.
    names = dict.fromkeys(name for known in digests.values() for name in known)
    unequal = [name for name in names if len({str(known.get(name)) for known in digests.values()}) > 1]
    # Gradients and buffers differ by rank until they are reduced, so a difference alone proves nothing.
    for name in unequal[:_MOST_TENSORS]:
        yield f"  differs  {name}{_how_far(list(digests), name) if tensor in name else ''}"
    if len(unequal) > _MOST_TENSORS:
        yield f"  differs  and {len(unequal) - _MOST_TENSORS} more"


def _read(path: Path) -> dict[str, Any] | str:
    try:
        content = read_json(path)
    except OSError as error:
        return str(error.strerror)
    except ValueError as error:
        return str(error)
    return content if isinstance(content, dict) else "it is not an object"


def _of_rank(folder: Path, part: Mapping[str, Any]) -> Iterator[str]:
    at = ", ".join(str(part[name]) for name in ("point", "doing") if part.get(name))
    yield f"  rank {part.get('rank')}   process {part.get('pid')} on {part.get('host')}, step {part.get('step')}, {at}"
    if ids := _list(part.get("ids")):
        more = f" and {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else ""
        yield f"    batch       rows {' '.join(map(str, ids[:_MOST_IDS]))}{more}"
    main = next((each for each in map(_mapping, _list(part.get("threads"))) if each.get("main")), {})
    for i, frame in enumerate(_list(main.get("frames"))[-_MOST_FRAMES:]):
        yield f"    {'' if i else 'stack':<11} {frame}"
    tensors = part.get("tensors")
    if isinstance(tensors, dict):
        missing = len(_list(tensors.get("left out")))
        limit = f"; {missing} left out, over {tensors.get('limit bytes')} bytes" if missing else ""
        yield f"    state       {len(_mapping(part.get('digests')))} tensors in {tensors.get('file')}{limit}"
    else:
        yield f"    state       {tensors or 'none: this rank was elsewhere when it learned of it'}"
    where = str(part.get("collectives", "not available"))
    record = None if where.startswith("not available") else _read(folder / Path(where).name)
    if not isinstance(record, dict):
        yield f"    collectives {where if record is None else record}"
        return
    for entry in [each for each in _list(record.get("entries")) if isinstance(each, dict)][-3:]:
        yield f"    collectives {entry.get('profiling_name')} {entry.get('input_sizes')} {entry.get('state')}"


def _how_far(parts: list[Path], name: str) -> str:
    import torch

    try:
        from safetensors import SafetensorError
        from safetensors.torch import load
    except ModuleNotFoundError:
        return ": how far cannot be read without safetensors"
    copies = []
    for path in parts:
        try:
            copies.append(load(read_regular(path.with_suffix(".safetensors"), _MOST_BYTES))[name].flatten())
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError):
            continue
    if len(copies) < 2 or len({(copy.shape, copy.dtype) for copy in copies}) > 1 or not copies[0].numel():
        return ""
    stacked = torch.stack([copy.view(torch.uint8).view(copy.numel(), -1) for copy in copies])
    elements = int((stacked != stacked[0]).any(0).any(-1).sum())
    values = torch.stack([(torch.view_as_real(copy) if copy.is_complex() else copy).double() for copy in copies])
    spread = float((values.amax(0) - values.amin(0)).max())
    return f": {elements} of {values.shape[1]} elements, by up to {spread:g}"
