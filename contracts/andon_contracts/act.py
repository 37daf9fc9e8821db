"""Turns a violation into a message that separates fact, inference and scope, a bundle, and the error to raise.

The bundle is a folder of files about a violation, or another end, for examination after its processes are gone.
FOLDER/STEP/CLAUSE.json is the account, written by the lowest live rank: the ledger's record of the violation, the
message, versions, environment. FOLDER/STEP/CLAUSE/ has a part for each live rank, written by that rank, without a
collective: `rank-R.json` (batch ids, stacks of all Python threads, digests by tensor), `rank-R.safetensors` (tensors),
`rank-R.collectives.json` (torch's record of its collectives, if it keeps one). No file is a pickle. Rows and weights
are in them, so only their owner can read them (0600).
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andon_contracts.agree import Observation, by_rank, real_of
from andon_contracts.clauses import CLAUSES
from andon_contracts.digest import hex64, tensor_digest
from andon_contracts.fingerprint import environment
from andon_contracts.record import SCHEMA_VERSION, Broken
from andon_contracts.violation import Cause, Finding, Violation, explain_command, first_line, named_ranks, row_lines

LIMIT_BYTES = 1 << 26
"""The most bytes of tensors that one rank writes: the broken tensor first, then the trained state in order."""
NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The format's name of each dtype that it supports."""
LASTING = frozenset({"replicas-agree", "gradients-agree", "optimizers-agree", "buffers-agree"})
"""Clauses that stay broken once the ranks differ, so that the fault may be of an update that was not read."""
_HIDDEN = ("andon_contracts", "torch", "icontract", "threading", "multiprocessing")  # packages that are never shown
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
LAUNCHER_FILES = set[str]()  # of the frames outside the script that `andon watch` runs, which are never shown
_MOST_FRAMES, _OWN = 64, os.path.dirname(__file__) + os.sep  # a stack is shown without the frames of this package
_ACTIVITIES = (
    ("torch.utils.data", "in the data loader"),
    ("torch.distributed", "in a collective"),
    ("torch.autograd", "in backward"),
    ("torch.cuda", "waiting for the device"),
)
"""The activity of a thread, by the package of its innermost frame in any of these packages."""


@dataclass(frozen=True)
class Scene:
    """The facts of a message besides the finding.

    applied: the update was made. before: what was equal before the update. unread: how many updates just before it were
    not read. element: the first element that differs. last_equal: the last update that left all weights equal.
    unwritten: why the bundle is incomplete. goes_on: nothing is raised. by_command: `andon watch` opened the watch.
    also: effects of the finding. at: the moment, if no update.
    """

    world: int = 1
    applied: bool = False
    last_equal: int | None = None
    before: str = ""
    rates_differ: bool = False
    unread: int = 0
    element: str = ""
    tensors: int = 0
    bundle: str = ""
    unwritten: str = ""
    goes_on: bool = False
    by_command: bool = False
    also: tuple[str, ...] = ()
    at: str = ""


@dataclass(frozen=True)
class Evidence:
    """What a rank can put into a bundle. folder: that of all bundles; None: none are written. ids: its current rows.

    tensors: the tensors to write if the named one is broken, that one first. devices: the names of the accelerators in
    use, read before a failure, because they may not answer after it.
    """

    folder: Path | None = None
    rank: int = 0
    world: int = 1
    ids: Callable[[], Sequence[int]] = tuple
    tensors: Callable[[str], Iterable[tuple[str, Tensor]]] = lambda _: ()
    devices: Sequence[str] = ()


def with_message(violation: Violation, scene: Scene) -> Violation:
    """The same violation with the whole `message`."""
    clause, finding = violation.clause, violation.finding
    return Violation(message(clause, finding, scene), clause=clause, finding=finding, bundle=scene.bundle)


def with_bundle(violation: Violation, scene: Scene, evidence: Evidence, facts: Mapping[str, object]) -> Violation:
    """Write this rank's part of the bundle, and on rank 0 the account. Returns the error that all ranks raise."""
    if evidence.folder is None:
        return with_message(violation, scene)
    place = evidence.folder / str(violation.step)
    complete = replace(scene, bundle=str(place))
    at = {"step": violation.step, "point": "after the update" if scene.applied else "before the update"}
    failed = write_part(place, violation.clause, evidence, at, violation.tensor)
    if evidence.rank == 0:
        error = with_message(violation, complete)
        likely = _likely(violation.clause, violation.finding, scene)
        known = {**asdict(scene), "cause": error.cause, "message": str(error), "likely": likely, **facts}
        failed = write_account(place, violation.clause, violation.finding, known, evidence.devices) or failed
    return with_message(violation, replace(complete, unwritten=failed))


def write_cause(cause: Cause, evidence: Evidence, at: Mapping[str, object], *, state: bool, account: bool) -> str:
    """Write what this rank knows when `cause` ends all ranks. Returns why not all could be written, or "".

    at: the position of this rank. state: tensors too. account: the account too. Writes nothing without a folder, or if
    the bundle was written when the violation was judged.
    """
    if evidence.folder is None or cause.written:
        return ""
    place = evidence.folder / str(cause.step)
    try:
        failed = write_part(place, cause.clause, evidence, at, cause.tensor if state else None)
        if account:
            facts = {"cause": cause.kind, "message": cause.text, "world": evidence.world}
            failed = write_account(place, cause.clause, cause.violation().finding, facts, evidence.devices) or failed
    except Exception as error:  # noqa: BLE001 - the error that stops all ranks must reach them, even without a bundle
        return first_line(error)
    return failed


def write_account(
    place: Path, clause: str, finding: Finding, facts: Mapping[str, object], devices: Sequence[str] = ()
) -> str:
    """Write PLACE/CLAUSE.json. Returns why the disk refused, or "": an exception would hide the violation."""
    machine = environment(torch.get_num_threads(), devices)
    packages = machine.pop("packages")
    versions = {**(packages if isinstance(packages, dict) else {}), "torch": torch.__version__}
    record = {"v": SCHEMA_VERSION, **Broken.of(clause, finding).to_json()}
    body = {"record": record, "explain": explain_command(place), "versions": versions, "environment": machine, **facts}
    return _write_json(place / f"{clause}.json", body)


def write_part(
    place: Path, clause: str, evidence: Evidence, at: Mapping[str, object], tensor: str | None = None
) -> str:
    """Write what this rank knows under PLACE/CLAUSE/. Returns why the disk refused, or "".

    at: the position of this rank. tensor: the broken one, written with the state; None: no tensors, for a thread that
    must not wait for a device.
    """
    folder, rank = place / clause, evidence.rank
    record, why = flight_record()
    process = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "ids": list(evidence.ids())}
    found = {"threads": thread_stacks(), "collectives": why or f"rank-{rank}.collectives.json"}
    body: dict[str, object] = {**process, **found, **at}
    failed = "" if record is None else _write_json(folder / f"rank-{rank}.collectives.json", record)
    if tensor is not None:
        failed = _write_state(folder, evidence, tensor, body) or failed
    return _write_json(folder / f"rank-{rank}.json", body) or failed


def _write_state(folder: Path, evidence: Evidence, named: str, body: dict[str, object]) -> str:
    written, left_out, digests, size = dict[str, Tensor](), list[str](), dict[str, str](), 0
    file = f"rank-{evidence.rank}.safetensors"
    try:
        for name, tensor in evidence.tensors(named):
            if name in digests:
                continue
            digests[name] = hex64(tensor_digest(tensor))
            if tensor.dtype not in NAMES or size + tensor.nbytes > LIMIT_BYTES:
                left_out.append(name)
                continue
            # A copy, so that the file has the digested values even if the loop continues.
            written[name] = tensor.detach().cpu().clone()
            size += tensor.nbytes
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / file, written, {"rank": str(evidence.rank)})
    except (OSError, RuntimeError) as error:
        body["tensors"] = f"not written: {error}"
        return str(error)
    body["tensors"] = {"file": file, "left out": left_out, "limit bytes": LIMIT_BYTES}
    body["digests"] = digests
    return ""


def _write_json(path: Path, body: Mapping[str, object]) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, [(json.dumps(body, indent=2, sort_keys=True, default=repr) + "\n").encode()])
    except OSError as error:
        return str(error)
    return ""


def agreement(observations: Sequence[Observation], *, moments: bool) -> str:
    """One line: what was equal on all ranks just before an update and what was not; "" for a single rank.

    moments: whether the optimizer states were equal after the update before.
    """
    if len(observations) == 1:
        return ""
    columns = ("weights", "gradient", "layout", "hyperparameters")
    same = {name for name in columns if len({o.values[name] for o in observations}) == 1}
    read = [bool(o.values["weights read"]) for o in observations]  # if only some ranks read them, no moment is named
    weights = ["weights"] * ("weights" in same)
    now = weights * all(read) + ["reduced gradient"] * ("gradient" in same)
    earlier = weights * (not any(read)) + ["moments"] * moments
    parts = [f"{_listed(now)} agreed"] if now else []
    if earlier:
        parts.append(f"{_listed(earlier)} agreed after step {observations[0].step - 1}, not read again since")
    rates = [real_of(o.values["rate"]) for o in observations]
    if len(set(rates)) > 1:
        parts.append(f"lr differs: {by_rank(list(map(repr, rates)))}")
    elif "layout" in same and "hyperparameters" not in same:
        parts.append("hyperparameters differ")
    return "; ".join(parts)


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def message(clause: str, finding: Finding, scene: Scene) -> str:
    """Several lines: the headline and `where` are facts, `likely` is an inference, `state` and `bundle` the scope."""
    tree = clause == "trees-agree"  # `assert_same`, which a script calls outside any update and watch
    likely = _likely(clause, finding, scene)
    where = "gradient of " * (clause == "gradients-agree" and bool(finding.details)) + finding.tensor
    if where and finding.details and scene.tensors:
        where += f" ({len(finding.details)} of {scene.tensors} {'leaves' if tree else 'tensors'})"
    if where and scene.element:
        where += f", {scene.element}"
    when, state = " at the start", "no step was applied"
    if finding.step:
        when = f" after step {finding.step}" if scene.applied else f" at step {finding.step}, before its update"
        before = "not applied yet, and the loop goes on" if scene.goes_on else "not applied"
        state = f"step {finding.step} was {'applied' if scene.applied else before}"
    if scene.last_equal is not None:
        state += f"; last state known equal: step {scene.last_equal}"
    if scene.at:
        when, state = f" {scene.at}", ""
    allow = f"--allow {clause}=<reason>" if scene.by_command else f'andon.watch(..., allow={{"{clause}": "<reason>"}})'
    known = scene.before
    if scene.unread and clause in LASTING:
        steps = f"steps {finding.step - scene.unread} to {finding.step}"
        known += f"; the fault lies in {steps}: budget=None finds the step"
    rows = [
        ("where", where),
        # If the bits of an element are shown, the digests are in the bundle only.
        ("seen", "" if scene.element and CLAUSES[clause].between_ranks else finding.seen),
        *(("also", each) for each in scene.also),
        ("before", known),
        ("likely", f"{likely}  [inference, not proof]" if likely else ""),
        ("state", "" if tree else state),
        ("bundle", f"{scene.bundle}  explain: {explain_command(Path(scene.bundle))}" if scene.bundle else ""),
        ("but", f"not all of the bundle could be written: {scene.unwritten}" if scene.unwritten else ""),
        ("silence", "" if tree else allow),
        ("more", "" if scene.bundle else f"andon explain {clause}"),
    ]
    verdict = "suspected" if finding.suspicion else "broken"
    head = f"{clause} {verdict}{'' if tree else when}: {_who(clause, finding, scene.world)}."
    return "\n".join([head, *row_lines(rows)])


def _likely(clause: str, finding: Finding, scene: Scene) -> str:
    if scene.unread and clause in LASTING:
        return ""  # what was not read, such as the gradients of these updates, may be the cause
    if finding.likely is None and scene.rates_differ and clause in ("replicas-agree", "optimizers-agree"):
        return CLAUSES["hyperparameters-agree"].likely
    return CLAUSES[clause].likely if finding.likely is None else finding.likely


def _who(clause: str, finding: Finding, world: int) -> str:
    if world == 1:
        return "seen in the one process"
    shown = f"{named_ranks(finding.ranks)} of {world}"
    if not CLAUSES[clause].between_ranks:
        return f"seen on {shown}" if finding.ranks else "seen on all ranks"
    if finding.ranks:
        others = [rank for rank in range(world) if rank not in finding.ranks]
        return f"{shown} differ{'s' * (len(finding.ranks) == 1)} from {named_ranks(others)}"
    if world == 2:
        return "ranks 0 and 1 differ"
    # No group of agreeing ranks has the majority.
    digests = finding.details[0][1].split() if finding.details else []
    if len(digests) != world:
        return "the ranks differ, with no majority"
    parties = [[rank for rank in range(world) if digests[rank] == one] for one in dict.fromkeys(digests)]
    if len(parties) == world:
        return f"{named_ranks(range(world))} all differ"
    return f"{_listed(list(map(named_ranks, parties)))} differ, with no majority"


def write_private(path: Path, parts: Iterable[bytes | ctypes.Array[ctypes.c_char]]) -> None:
    """Write `path` whole or not at all, readable by its owner alone (0600): it will hold rows or weights."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o600)  # a umask may have taken the owner's own rights away
            file.writelines(parts)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write dense tensors to `path`, whole or not at all.

    Raises `OSError` if the disk refuses, and `ValueError` for a dtype that is not in `NAMES`.
    """
    odd = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in NAMES]
    if odd:
        raise ValueError(f"the safetensors format cannot store {', '.join(odd)}")
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in copies.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns tensors, for readers that map the file
    data = [(ctypes.c_char * t.nbytes).from_address(t.data_ptr()) for t in copies.values() if t.nbytes]
    write_private(path, [struct.pack("<Q", len(text)) + text, *data])


def thread_stacks() -> list[dict[str, object]]:
    """Every Python thread of this process: `name`, `main`, `frames` from the outermost as `file:line function`."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads: list[dict[str, object]] = []
    for ident, frame in sys._current_frames().items():
        stack = traceback.extract_stack(frame, limit=_MOST_FRAMES)
        frames = [f"{f.filename}:{f.lineno} {f.name}" for f in stack if not f.filename.startswith(_OWN)]
        main = ident == threading.main_thread().ident
        threads.append({"name": names.get(ident, f"thread {ident}"), "main": main, "frames": frames})
    return threads


def current_activity(ident: int) -> str:
    """The activity of thread `ident` (in a collective, in backward, in the data loader) and its line of user code."""
    frames = list(traceback.walk_stack(sys._current_frames().get(ident)))
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in frames]
    activities = (text for module in modules for package, text in _ACTIVITIES if module.startswith(package))
    return ", ".join(filter(None, (next(activities, ""), _user_line(frames, " ")))) or "outside Python code"


def error_line(error: BaseException) -> str:
    """The innermost line of user code that `error` passed through, as `file:line in function`, or ""."""
    return _user_line(reversed(list(traceback.walk_tb(error.__traceback__))), " in ")


def end_at_user_line(error: BaseException) -> None:
    """Cut the traceback of `error` after its innermost line of user code, if it passed through any."""
    trace, last = error.__traceback__, None
    while trace is not None:
        last, trace = trace if _is_users(trace.tb_frame) else last, trace.tb_next
    if last is not None:
        last.tb_next = None


def user_line() -> str:
    """The innermost line of user code on this thread's stack, as `file:line`, or ""."""
    return _user_line(traceback.walk_stack(sys._getframe(1)), "")


def _user_line(innermost_first: Iterable[tuple[Any, int]], separator: str) -> str:
    """The first frame of user code, else of a library. separator: the text before the function's name; "" omits it."""
    library = ""
    for frame, line in innermost_first:
        if not _is_hidden(frame):
            shown = f"{frame.f_code.co_filename}:{line}" + (f"{separator}{frame.f_code.co_name}" if separator else "")
            if _is_users(frame):
                return shown
            library = library or shown
    return library


def _is_hidden(frame: Any) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return frame.f_code.co_filename in LAUNCHER_FILES or package in _HIDDEN


def _is_users(frame: Any) -> bool:
    file = frame.f_code.co_filename
    is_library = file.startswith((*_LIBRARIES, "<frozen ")) or f"{os.sep}site-packages{os.sep}" in file
    return not (is_library or _is_hidden(frame))


def flight_record() -> tuple[Mapping[str, Any] | None, str]:
    """Torch's record of this process's collectives (its Flight Recorder), or None and the reason.

    `entries` combines the records of nccl and of the other backends.
    """
    module = getattr(torch._C, "_distributed_c10d", None)
    dumps = [getattr(module, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    if not any(dumps):
        return None, "not available: this torch has no Flight Recorder"
    try:
        records = [json.loads(dump()) for dump in dumps if dump is not None]
    except (RuntimeError, ValueError) as error:
        return None, f"not available: {error}"
    entries = [entry for record in records for entry in record.get("entries", ())]
    if not entries:
        return None, "not available: the Flight Recorder is empty; set TORCH_FR_BUFFER_SIZE=2000, for gloo too"
    return {"entries": entries, "groups": [record.get("pg_config") for record in records]}, ""
