"""Asking a run that trains for another number of workers: two small files beside the ranks' reports.

`agents.json` says who the launcher is, its bounds, and each agent with its rank and worker; `resize` holds the number
that is asked for until the launcher has taken it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from andon.console.messages import say
from andon.console.problems import InputError, Problem
from andon.launch.sizes import Bounds
from andon.run.atomic import storage, write_json, write_whole
from andon.run.folder import REPORTS
from andon_contracts.liveness.process import Process
from andon_contracts.untrusted import read_json, read_regular

_SEEN, _ASKED = "agents.json", "resize"
_MOST_BYTES = 1 << 10


@dataclass(frozen=True)
class AgentProcess:
    """One agent as others may see it: process ids of it and of its worker."""

    rank: int
    agent: int
    worker: int


def show(run_folder: Path, bounds: Bounds, generation: int, agents: list[AgentProcess]) -> None:
    """Say who trains here now. `generation` counts from 1. Raises `InputError` where the disk refuses."""
    us = Process.of(os.getpid())
    path = run_folder / REPORTS / _SEEN
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    launcher = {} if us is None else {"pid": us.pid, "started": us.started}
    bounded = {"least": bounds.least, "most": bounds.most, "generation": generation}
    write_json(path, {"launcher": launcher, **bounded, "agents": [asdict(agent) for agent in agents]})


def hide(run_folder: Path) -> None:
    """Nobody trains here any more, and nothing is asked for."""
    for name in (_SEEN, _ASKED):
        _remove(run_folder / REPORTS / name)


def give_up(run_folder: Path, wanted: int | None) -> None:
    """The run has ended: nobody is shown here any more, and who asked for `wanted` workers, or does now, is told."""
    _remove(run_folder / REPORTS / _SEEN)
    asked = taken(run_folder) or wanted
    if asked is not None:
        say(f"elastic: {asked} workers were asked for, and the run has ended before it could go on with them")


def taken(run_folder: Path) -> str | None:
    """What was asked for since the last call, as it was written; None where nothing was."""
    path = run_folder / REPORTS / _ASKED
    try:
        found = read_regular(path, _MOST_BYTES).decode("utf-8", "replace")[:40].strip()
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found


def _remove(path: Path) -> None:
    """Remove the file; nothing where it is gone, or the run's folder is and something else has its name."""
    with suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()


def ask(run_folder: Path, workers: int) -> None:
    """Ask the launcher that trains in `run_folder` for another number of workers.

    Raises `InputError` where none does, where it was started without `--workers MIN:MAX`, for a number outside, and
    where the run ends while it is asked.
    """
    path = run_folder / REPORTS / _SEEN
    try:
        found = read_json(path)
        launcher, bounds = Process(**found["launcher"]), Bounds(found["least"], found["most"])
    except (FileNotFoundError, NotADirectoryError):
        launcher = None
    except (ValueError, TypeError, KeyError) as error:
        raise InputError([Problem(str(path), f"is not what a launcher writes: {error}")]) from error
    if launcher is None or launcher.state() == "gone":
        what = "no run that was started with --workers MIN:MAX trains here"
        raise InputError([Problem(str(run_folder), what)])
    if not bounds.least <= workers <= bounds.most:
        raise InputError([Problem("WORKERS", f"{workers} is outside of --workers {bounds}")])
    asked = path.with_name(_ASKED)
    write_whole(asked, f"{workers}\n".encode())
    if not path.exists() and asked.exists():  # whoever would have taken it has gone first
        asked.unlink(missing_ok=True)
        raise InputError([Problem(str(run_folder), "the run has just ended")])
