"""The bundle: the files by which a violation, or another end, can be examined after its processes are gone.

FOLDER/STEP/CLAUSE.json is the account, written by the lowest live rank: the ledger's record of the violation, the
message, versions. FOLDER/STEP/CLAUSE/ has a part for each live rank, written by that rank, without a collective:
`rank-R.json` (batch ids, stacks of all Python threads, digests by tensor), `rank-R.safetensors` (tensors),
`rank-R.collectives.json` (torch's record of its collectives, where it keeps one). Nothing in it is a pickle, and all of
it is for its owner alone (0600), since rows and weights are in it.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from andon_contracts.causes import Cause, first_line
from andon_contracts.digest import hex64, tensor_digest
from andon_contracts.fingerprint import environment
from andon_contracts.record import SCHEMA_VERSION, Broken
from andon_contracts.stacks import flight_record, thread_stacks
from andon_contracts.tensor_file import NAMES, open_private, write_tensors
from andon_contracts.violation import Finding

LIMIT_BYTES = 1 << 26
"""The most bytes of tensors that one rank writes: what was named first, then the trained state in order."""


@dataclass(frozen=True)
class Evidence:
    """What a rank can put into a bundle. `folder`: where bundles go, None for nowhere; `rank` of `world`.

    tensors: the tensors that matter if the one of that name is broken, that first. devices: the names of the
    accelerators in use, read while they still answer.
    """

    folder: Path | None = None
    rank: int = 0
    world: int = 1
    ids: Callable[[], Sequence[int]] = tuple
    tensors: Callable[[str], Iterable[tuple[str, Tensor]]] = lambda _: ()
    devices: Sequence[str] = ()

    def place(self, step: int) -> Path | None:
        """The folder of the bundle of `step`."""
        return None if self.folder is None else self.folder / str(step)


def explaining(place: Path) -> str:
    """The command that explains the bundle at `place`."""
    return f"andon explain {shlex.quote(str(place))}"


def write_account(
    place: Path, clause: str, finding: Finding, facts: Mapping[str, object], devices: Sequence[str] = ()
) -> str:
    """Write PLACE/CLAUSE.json. Returns why the disk refused, or "": a full disk hides no violation."""
    record = Broken(clause, finding.step, finding.ranks, finding.tensor, finding.seen, dict(finding.details))
    versions = environment(torch.get_num_threads(), devices)
    packages = versions.pop("packages")
    versions |= {**(packages if isinstance(packages, dict) else {}), "torch": torch.__version__}
    told = {"v": SCHEMA_VERSION, **record.to_json()}
    body = {"record": told, "explain": explaining(place), "versions": versions, **facts}
    return _write_json(place / f"{clause}.json", body)


def write_cause(cause: Cause, evidence: Evidence, at: Mapping[str, object], *, state: bool, account: bool) -> str:
    """Write what this rank knows when `cause` ends all ranks. Returns why not all could be written, or "".

    at: where this rank is. state: tensors too. account: the account as well. Writes nothing if the cause has its bundle
    already, or there is no folder.
    """
    place = evidence.place(cause.step)
    if place is None or cause.written:
        return ""
    try:
        failed = write_part(place, cause.clause, evidence, at, cause.tensor if state else None)
        if account:
            facts = {"cause": cause.kind, "message": cause.text, "world": evidence.world}
            found = cause.violation().finding
            failed = write_account(place, cause.clause, found, facts, evidence.devices) or failed
    except Exception as error:  # noqa: BLE001 - what stops all ranks must reach them, whatever a bundle lacks
        return first_line(error)
    return failed


def write_part(
    place: Path, clause: str, evidence: Evidence, at: Mapping[str, object], tensor: str | None = None
) -> str:
    """Write what this rank knows under PLACE/CLAUSE/. Returns why the disk refused, or "".

    at: where this rank is. tensor: the one that is broken, and the state with it; None writes no tensors, as from a
    thread that must not wait for a device.
    """
    folder, rank = place / clause, evidence.rank
    record, why = flight_record()
    body: dict[str, object] = {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "ids": list(evidence.ids()),
        "threads": thread_stacks(),
        "collectives": why or f"rank-{rank}.collectives.json",
        **at,
    }
    failed = "" if record is None else _write_json(folder / f"rank-{rank}.collectives.json", record)
    if tensor is not None:
        failed = _write_state(folder, evidence, tensor, body) or failed
    return _write_json(folder / f"rank-{rank}.json", body) or failed


def _write_state(folder: Path, evidence: Evidence, tensor: str, body: dict[str, object]) -> str:
    kept, left_out, digests, size = dict[str, Tensor](), list[str](), dict[str, str](), 0
    try:
        for name, found in evidence.tensors(tensor):
            if name in digests:
                continue
            digests[name] = hex64(tensor_digest(found))
            if found.dtype not in NAMES or size + found.nbytes > LIMIT_BYTES:
                left_out.append(name)
                continue
            # A copy, so that what is written is what was digested even where the loop goes on.
            kept[name] = found.detach().cpu().clone()
            size += found.nbytes
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / f"rank-{evidence.rank}.safetensors", kept, {"rank": str(evidence.rank)})
    except (OSError, RuntimeError) as error:
        body["tensors"] = f"not written: {error}"
        return str(error)
    body["tensors"] = {"file": f"rank-{evidence.rank}.safetensors", "left out": left_out, "limit bytes": LIMIT_BYTES}
    body["digests"] = digests
    return ""


def _write_json(path: Path, body: Mapping[str, object]) -> str:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(body, indent=2, sort_keys=True, default=repr) + "\n"
        with open_private(part) as file:
            file.write(text.encode())
        part.replace(path)
    except OSError as error:
        return str(error)
    return ""
