"""Paths that a user names: there, readable, and what they should be."""

from __future__ import annotations

from pathlib import Path

from andon.console.problems import InputError, Problem, did_you_mean


def require_file(path: Path, *, empty: bool = False) -> None:
    """Raise `InputError` unless `path` is a regular file (with something in it, unless `empty` is allowed)."""
    where = str(path)
    try:
        if path.is_dir():
            fault = "is a folder; name a file in it"
        elif not path.exists():
            names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            fault = f"no such file{did_you_mean(path.name, names)}"
        elif not path.is_file():
            fault = "is no regular file"
        elif path.stat().st_size == 0 and not empty:
            fault = "is empty"
        else:
            return
    except OSError as error:
        fault = f"cannot be read: {error.strerror or error}"
    except ValueError as error:
        fault = f"is no path: {error}"
    raise InputError([Problem(where, fault)])


def is_there(path: Path) -> bool:
    """Whether anything is at `path`. Raises `InputError` for what can be no path, as a name that is too long."""
    try:
        return path.exists()
    except (OSError, ValueError) as error:
        raise _no_path(path, error) from error


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder. Raises `InputError` for what can be no path, as a name that is too long."""
    try:
        return path.is_dir()
    except (OSError, ValueError) as error:
        raise _no_path(path, error) from error


def _no_path(path: Path, error: OSError | ValueError) -> InputError:
    what = error.strerror if isinstance(error, OSError) else str(error)
    return InputError([Problem(str(path), f"cannot be read: {what}")])
