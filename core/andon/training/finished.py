"""A run that can be used: found without torch, so that a wrong path is said at once, before any input is read."""

from __future__ import annotations

from pathlib import Path

from andon.config.source import is_there
from andon.problems import InputError, Problem
from andon.run.folder import RunFolder, State


def require_run(path: Path) -> RunFolder:
    """The run folder at `path` with an adapter in it. Raises `InputError` where there is none; reads no data."""
    folder = RunFolder(path)
    if not is_there(path):
        raise InputError([Problem(str(path), "there is no such run")])
    if folder.state() in (State.EMPTY, State.FOREIGN):
        raise InputError([Problem(str(path), "holds no run of andon")])
    if not folder.adapter.is_dir():
        what = f"has no trained adapter yet; finish it: andon train {folder.config} --run-dir {path} --resume auto"
        raise InputError([Problem(str(path), what)])
    return folder
