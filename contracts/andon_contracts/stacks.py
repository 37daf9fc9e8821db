"""What this process is doing: the stacks of its Python threads, and torch's record of its collectives."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

_MACHINERY = ("andon_contracts", "torch", "icontract", "threading", "multiprocessing")
"""Packages of which no line is ever named."""
_INSTALLED = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
"""The folders of Python's own code and of installed packages: a user's code is elsewhere."""
_MOST_FRAMES = 64
_PLACES = (
    ("torch.utils.data", "in the data loader"),
    ("torch.distributed", "in a collective"),
    ("torch.autograd", "in backward"),
    ("torch.cuda", "waiting for the device"),
)
"""Where a rank is, in words, by the package of its innermost frame of these."""


def thread_stacks() -> list[dict[str, object]]:
    """Every Python thread of this process: `name`, `main`, `frames` from the outermost as `file:line function`."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found: list[dict[str, object]] = []
    for ident, frame in sys._current_frames().items():
        frames = traceback.extract_stack(frame, limit=_MOST_FRAMES)
        shown = [f"{each.filename}:{each.lineno} {each.name}" for each in frames]
        found.append({"name": names.get(ident, f"thread {ident}"), "main": ident == main, "frames": shown})
    return found


def current_activity(ident: int) -> str:
    """Where the thread is: in a collective, in backward, in the data loader; and the line of the user's loop."""
    frames = list(traceback.walk_stack(sys._current_frames().get(ident)))
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in frames]
    places = (word for module in modules for package, word in _PLACES if module.startswith(package))
    return ", ".join(filter(None, (next(places, ""), _line(frames, " ")))) or "where no Python runs"


def error_line(error: BaseException) -> str:
    """The innermost line of the user's own code that `error` came through; empty where there is none."""
    return _line(reversed(list(traceback.walk_tb(error.__traceback__))), " in ")


def user_line() -> str:
    """The innermost line of the user's own code that this thread is in, as `file:line`; empty where there is none."""
    return _line(traceback.walk_stack(sys._getframe(1)), "")


def _line(innermost_first: Iterable[tuple[Any, int]], function: str) -> str:
    """The first of these frames that is the user's, else of a library. function: what stands before its name."""
    library = ""
    for frame, line in innermost_first:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _MACHINERY:
            continue
        file = frame.f_code.co_filename
        shown = f"{file}:{line}" + (f"{function}{frame.f_code.co_name}" if function else "")
        if not file.startswith((*_INSTALLED, "<frozen ")) and f"{os.sep}site-packages{os.sep}" not in file:
            return shown
        library = library or shown
    return library


def flight_record() -> tuple[Mapping[str, Any] | None, str]:
    """Torch's own record of this process's collectives (its Flight Recorder), or None and why there is none.

    `entries` are those of every backend that keeps a record: nccl its own, the others one.
    """
    module = getattr(torch._C, "_distributed_c10d", None)
    dumps = [getattr(module, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    if not any(dumps):
        return None, "not available: this torch has no Flight Recorder"
    try:
        found = [json.loads(dump()) for dump in dumps if dump is not None]
    except (RuntimeError, ValueError) as error:
        return None, f"not available: {error}"
    entries = [entry for record in found for entry in record.get("entries", ())]
    if not entries:
        return None, "not available: it is empty; TORCH_FR_BUFFER_SIZE=2000 lets torch keep it, for gloo too"
    return {"entries": entries, "groups": [record.get("pg_config") for record in found]}, ""


def pending(entries: Sequence[Mapping[str, Any]], most: int) -> list[str]:
    """The last `most` of the recorded collectives, in words: name, sizes, state."""
    return [
        f"{entry.get('profiling_name')} {entry.get('input_sizes')} {entry.get('state')}" for entry in entries[-most:]
    ]
