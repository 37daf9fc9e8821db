"""What this process is doing: the stacks of its Python threads, and torch's record of its collectives."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_HIDDEN = ("andon_contracts", "torch", "icontract", "threading", "multiprocessing")
"""Packages whose lines are never shown."""
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_MOST_FRAMES = 64
_ACTIVITIES = (
    ("torch.utils.data", "in the data loader"),
    ("torch.distributed", "in a collective"),
    ("torch.autograd", "in backward"),
    ("torch.cuda", "waiting for the device"),
)
"""The activity of a thread, by the package of its innermost frame in any of these packages."""


def thread_stacks() -> list[dict[str, object]]:
    """Every Python thread of this process: `name`, `main`, `frames` from the outermost as `file:line function`."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads: list[dict[str, object]] = []
    for ident, frame in sys._current_frames().items():
        frames = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame, limit=_MOST_FRAMES)]
        main = ident == threading.main_thread().ident
        threads.append({"name": names.get(ident, f"thread {ident}"), "main": main, "frames": frames})
    return threads


def current_activity(ident: int) -> str:
    """The activity of thread `ident` (in a collective, in backward, in the data loader) and its line of user code."""
    frames = list(traceback.walk_stack(sys._current_frames().get(ident)))
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in frames]
    activities = (text for module in modules for package, text in _ACTIVITIES if module.startswith(package))
    return ", ".join(filter(None, (next(activities, ""), _user_line(frames, " ")))) or "where no Python runs"


def error_line(error: BaseException) -> str:
    """The innermost line of user code that `error` passed through, as `file:line in function`, or ""."""
    return _user_line(reversed(list(traceback.walk_tb(error.__traceback__))), " in ")


def user_line() -> str:
    """The innermost line of user code on this thread's stack, as `file:line`, or ""."""
    return _user_line(traceback.walk_stack(sys._getframe(1)), "")


def _user_line(innermost_first: Iterable[tuple[Any, int]], separator: str) -> str:
    """The first frame of user code, else of a library. separator: the text before the function's name; "" omits it."""
    library = ""
    for frame, line in innermost_first:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _HIDDEN:
            continue
        file = frame.f_code.co_filename
        shown = f"{file}:{line}" + (f"{separator}{frame.f_code.co_name}" if separator else "")
        if not file.startswith((*_LIBRARIES, "<frozen ")) and f"{os.sep}site-packages{os.sep}" not in file:
            return shown
        library = library or shown
    return library


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
        return None, "not available: it is empty; TORCH_FR_BUFFER_SIZE=2000 lets torch keep it, for gloo too"
    return {"entries": entries, "groups": [record.get("pg_config") for record in records]}, ""
