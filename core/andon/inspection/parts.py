"""What each rank left in a bundle, in words: its batch, where it was, its tensors compared with the others' (item 4).

The files are read as JSON and as plain bytes of tensors; nothing in them is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from andon_contracts.stacks import pending
from andon_contracts.tensor_file import read_tensors

_MOST_IDS = 16
_MOST_FRAMES = 6
_MOST_TENSORS = 8
_MOST_BYTES = 1 << 28


def explain_parts(folder: Path, tensor: str) -> Iterator[str]:
    """Lines on the `rank-R.json` in `folder`, and on how the ranks' copies of `tensor` differ."""
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
