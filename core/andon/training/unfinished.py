"""The run that `--resume auto` means where no folder is named: found without torch, before anything is started."""

from __future__ import annotations

from pathlib import Path

from andon.config.identity import identity
from andon.config.load import load_config
from andon.config.schema import Config
from andon.messages import say
from andon.problems import InputError
from andon.run.folder import RunFolder, State
from andon.run.provenance import read_provenance
from andon.training.rows import read_rows


def newest_unfinished(config: Config, base: Path) -> RunFolder | None:
    """The run right under `base` that was written to last, has not ended, and is the one that `config` defines.

    It is the same run where both configurations have one identity and name the same data. Raises `InputError` for
    data that is wrong. Folders that hold no run, or one whose configuration or provenance cannot be read, are not it;
    neither is a run with something else in the place of a file, of which a line says that it was passed over.
    """
    wanted, data = identity(config), ""
    for folder in _latest_first(base):
        if _identity_of(folder) != wanted:
            continue
        data = data or read_rows(config).digest
        if data_of(folder) == data:
            return folder
    return None


def _latest_first(base: Path) -> list[RunFolder]:
    """The unfinished runs under `base`, the one whose ledger grew last before the others."""
    folders = [RunFolder(path) for path in (base.iterdir() if base.is_dir() else ()) if path.is_dir()]
    return sorted(filter(_is_unfinished, folders), key=_last_written, reverse=True)


def _is_unfinished(folder: RunFolder) -> bool:
    try:
        return folder.begun() and folder.state() is State.UNFINISHED
    except InputError as error:
        say(f"resume: {folder.path} is passed over: {error}")
        return False


def _last_written(folder: RunFolder) -> tuple[int, str]:
    return folder.ledger.stat().st_mtime_ns if folder.ledger.exists() else 0, folder.path.name


def _identity_of(folder: RunFolder) -> dict[str, object] | None:
    try:
        return identity(load_config(folder.config))
    except InputError:
        return None


def data_of(folder: RunFolder) -> str | None:
    """The digest of the data of the run in `folder`, as it began; None where that cannot be read."""
    try:
        return read_provenance(folder.provenance).digest("data")
    except InputError:
        return None
