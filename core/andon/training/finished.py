"""A run that can be used: found without torch, so that a wrong path is said at once, before any input is read."""

from __future__ import annotations

from pathlib import Path

from andon.config.identity import differences, identity
from andon.config.load import load_config
from andon.config.schema import Config
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


def require_same_as_finished(config: Config, folder: RunFolder) -> None:
    """Refuse a configuration that asks for another run than the finished one in `folder`.

    Raises `InputError` for each key that defines a run and differs, and for other data. On which kind of device it ran
    does not matter to one that has nothing left to do.
    """
    try:
        was = load_config(folder.config)
    except InputError:
        return  # it cannot be told any more
    changed = differences(identity(was), identity(config))
    found = [
        Problem(key, f"was {before!r} in the finished run in {folder.path}, is {now!r}; name another folder")
        for key, before, now in changed
        if key != "run.device_kind"
    ]
    if not found and (was.data.train, was.data.eval) != (config.data.train, config.data.eval):
        from andon.training.rows import read_rows
        from andon.training.unfinished import data_of

        if data_of(folder) != read_rows(config).digest:
            found = [Problem("data", f"is not that of the finished run in {folder.path}; name another folder")]
    if found:
        raise InputError(found)
