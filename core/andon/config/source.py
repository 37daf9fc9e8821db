"""Paths that a user names: there, readable, and what they should be.

A folder with a model or an adapter may be from anybody (SECURITY.md): what libraries would read in it is looked at
first, and nothing in it is run.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from andon.console.problems import InputError, Problem, ProblemList, did_you_mean, is_panic, shown
from andon_contracts.legible import legible_line

_MOST_FILES = 10_000
MOST_BYTES = 1 << 24
"""Of a file of settings; those of tokenizers and the index of a large model's weights hold more."""
_MOST_BYTES_OF = dict.fromkeys(("tokenizer.json", "vocab.json", ".txt", ".model"), 1 << 28) | {".index.json": 1 << 26}
_SETTINGS = (".json", ".jinja", ".txt", ".model")
_MOST_LAYERS, _MOST_CLASSES = 1000, 1 << 20
_LONGEST_REASON = 500
_LAYERS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"),
    *("num_hidden_groups", "block_sizes", "attention_types"),
)
_CLASSES = ("num_labels", "extra_ids")


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
    return _asked(path, Path.exists)


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder. Raises `InputError` for what can be no path, as a name that is too long."""
    return _asked(path, Path.is_dir)


def _asked(path: Path, question: Callable[[Path], bool]) -> bool:
    try:
        return question(path)
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError([Problem(str(path), f"cannot be read: {what}")]) from error


@contextmanager
def loading(source: str, where: str, what: str = "") -> Iterator[None]:
    """Inside, transformers reads `what` of the folder `source` (or of what the hub has under that name), whose files
    are looked at first. It shows no progress, warns of nothing (a head is new by design), and its errors are legible.

    Raises `InputError` at `where`, for a folder that `require_model_folder` refuses and for whatever the library
    raises, a panic of native code too: which exceptions files of others bring about in it nobody can list.
    """
    folder = Path(source).expanduser()
    if is_folder(folder):
        require_model_folder(folder, where)
    try:
        with quiet_loading():
            yield
    except InputError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        named = f"the {what} of {source!r}" if what else repr(source)
        raise InputError([Problem(where, f"cannot load {named}: {reason[:_LONGEST_REASON]}")]) from error


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Inside, transformers shows no progress and warns of nothing, and what it says of an error is legible."""
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    handlers = logging.getLogger("transformers").handlers
    for handler in handlers:
        handler.addFilter(_written_out)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_written_out)
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()


def _written_out(record: logging.LogRecord) -> bool:
    """What a library says of a file quotes the file."""
    record.msg, record.args = legible_line(record.getMessage()), ()
    return True


def require_model_folder(folder: Path, where: str) -> None:
    """Raise `InputError`, with all that is wrong, unless `folder` holds nothing but files that can be read as data.

    Regular files inside it alone (links too, where they lead into it, or into the store of a hub's cache), of bounded
    size; weights that an index names by plain names; no setting that names code: transformers fetches a kernel of
    attention from the hub where a configuration names one.
    """
    problems = ProblemList()
    inside = [folder.resolve(), (folder / ".." / ".." / "blobs").resolve()]
    for number, path in enumerate(_files(folder)):
        if number == _MOST_FILES:
            problems.add(where, f"{folder} has more than {_MOST_FILES} files; give the model's own folder")
            break
        fault = _unreadable(path, inside)
        if fault:
            problems.add(where, f"{path} {fault}")
        elif path.suffix == ".json" and path.parent == folder:
            for fault in _settings_faults(path):
                problems.add(where, f"{path} {fault}")
    problems.raise_if_any()


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        # A library goes through a link to a folder, which this walk does not.
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        yield from (Path(parent, name) for name in sorted([*names, *links]))


def _unreadable(path: Path, inside: list[Path]) -> str:
    """Why the file at `path` is not one to open; empty where it is."""
    try:
        found = path.stat()
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if not stat.S_ISREG(found.st_mode):
        return "is no regular file"
    if path.is_symlink() and not any(real.is_relative_to(place) for place in inside):
        return "is a link that leads out of the folder"
    if path.suffix in _SETTINGS:
        most = next((most for end, most in _MOST_BYTES_OF.items() if path.name.endswith(end)), MOST_BYTES)
        if found.st_size > most:
            return f"has {found.st_size} bytes, more than {most}"
    return ""


def _settings_faults(path: Path) -> Iterator[str]:
    """What is wrong with a file of settings, as far as that can be said without knowing the model."""
    if path.name.endswith(("tokenizer.json", "vocab.json")):
        return
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return  # who reads it says so, and what nobody reads may be anything
    if not isinstance(found, dict):
        return
    if path.name.endswith(".index.json"):
        named = found.get("weight_map")
        odd = {str(name) for name in named.values() if not _plain(name)} if isinstance(named, dict) else set()
        yield from (f"names weights outside of the folder: {shown(name)}" for name in sorted(odd)[:3])
    yield from setting_faults(found)


def setting_faults(settings: Mapping[str, object]) -> Iterator[str]:
    """What is wrong with a model's settings: names of code, and numbers that no model has."""
    for key, value in _leaves(settings):
        choice = isinstance(value, str) and key.endswith("_implementation")
        if choice and not str(value).replace("_", "").replace("|", "").isalnum():
            yield f"names code in {key}: {shown(value)}"
        for keys, most in ((_LAYERS, _MOST_LAYERS), (_CLASSES, _MOST_CLASSES)):
            if key in keys and isinstance(value, int) and value > most:
                yield f"has {key} {value}, more than {most}"


def _plain(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\x00" not in name


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    waiting = [(key, value)]
    while waiting:
        name, found = waiting.pop()
        if isinstance(found, dict):
            # A choice by part of the model stands one level deeper.
            waiting += [(name if name.endswith("_implementation") else str(own), each) for own, each in found.items()]
        elif isinstance(found, list):
            waiting += [(name, each) for each in found]
        else:
            yield name, found
