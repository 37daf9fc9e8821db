"""Checks of paths that a user names.

A folder with a model or an adapter is untrusted (SECURITY.md): its files are checked before a library reads them, and
none of its code runs.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from andon.console.messages import InputError, ProblemList, did_you_mean, is_panic, shown
from andon_contracts.legible import legible_line

_MOST_FILES = 10_000
MOST_BYTES = 1 << 24
"""Limit of a settings file; `_MOST_BYTES_OF` has larger ones for tokenizers and the index of weights."""
_MOST_BYTES_OF = dict.fromkeys(("tokenizer.json", "vocab.json", ".txt", ".model"), 1 << 28) | {".index.json": 1 << 26}
_SETTINGS = (".json", ".jinja", ".txt", ".model")
_LONGEST_REASON = 500
_MOST_OF = dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"), 1000)
_MOST_OF |= dict.fromkeys(("decoder_layers", "num_hidden_groups", "block_sizes", "attention_types"), 1000)
_MOST_OF |= dict.fromkeys(("num_labels", "extra_ids"), 1 << 20)
"""Upper limits of a model's settings."""


def require_file(path: Path, *, empty: bool = False) -> None:
    """Raise `InputError` unless `path` is a regular file (with something in it, unless `empty` is allowed)."""
    where = str(path)
    try:
        if path.is_dir():
            fault = "is a folder; name a file in it"
        elif not path.exists():
            names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            fault = f"no such file{did_you_mean(path.name, names, cutoff=0.82)}"  # the suffix alone is half a name
        elif not path.is_file():
            fault = "is not a regular file"
        elif path.stat().st_size == 0 and not empty:
            fault = "is empty"
        else:
            return
    except OSError as error:
        fault = f"cannot be read: {error.strerror or error}"
    except ValueError as error:
        fault = f"is not a path: {error}"
    raise InputError.at(where, fault)


def is_there(path: Path) -> bool:
    """Whether `path` exists. Raises `InputError` for an impossible path, such as a name that is too long."""
    return _answered(path, path.exists)


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder. Raises `InputError` for an impossible path, such as a name that is too long."""
    return _answered(path, path.is_dir)


def _answered(path: Path, question: Callable[[], bool]) -> bool:
    try:
        return question()
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError.at(path, f"cannot be read: {what}") from error


@contextmanager
def loading(source: str, where: str, what: str = "") -> Iterator[None]:
    """Context manager in which transformers loads `what` from `source`, a folder or a model on the hub.

    Raises `InputError` at `where` if `require_model_folder` refuses the folder, and for any exception of the library or
    panic of native code: an untrusted file can cause any of them.
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
        raise InputError.at(where, f"cannot load {named}: {reason[:_LONGEST_REASON]}") from error


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Inside, transformers logs no progress and no warnings (a new head is intended), and its errors are escaped."""
    from transformers.utils import logging as theirs

    def legible(record: logging.LogRecord) -> bool:
        """Escape the message, as it may quote an untrusted file."""
        record.msg, record.args = legible_line(record.getMessage()), ()
        return True

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    handlers = logging.getLogger("transformers").handlers
    for handler in handlers:
        handler.addFilter(legible)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(legible)
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()


def require_model_folder(folder: Path, where: str) -> None:
    """Raise `InputError` with every problem unless all files of `folder` are safe to read.

    Files must be regular and of bounded size; links must stay inside or lead to the blobs of a hub cache. An index must
    name weights by plain file names. No setting may name code, such as an attention kernel that transformers would
    fetch from the hub.
    """
    problems = ProblemList()
    inside = [folder.resolve(), (folder / ".." / ".." / "blobs").resolve()]
    # Includes links to folders, which a library follows but `os.walk` does not.
    paths = (
        Path(parent, name)
        for parent, folders, names in os.walk(folder)
        for name in sorted([*names, *(each for each in folders if os.path.islink(os.path.join(parent, each)))])
    )
    for number, path in enumerate(paths):
        if number == _MOST_FILES:
            problems.add(where, f"{folder} has more than {_MOST_FILES} files; give the model's own folder")
            break
        most = next((most for end, most in _MOST_BYTES_OF.items() if path.name.endswith(end)), MOST_BYTES)
        fault = ""
        try:
            status, real = path.stat(), path.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            fault = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        else:
            if not stat.S_ISREG(status.st_mode):
                fault = "is not a regular file"
            elif path.is_symlink() and not any(real.is_relative_to(place) for place in inside):
                fault = "is a link that leads out of the folder"
            elif path.suffix in _SETTINGS and status.st_size > most:
                fault = f"has {status.st_size} bytes, more than {most}"
        if fault:
            problems.add(where, f"{path} {fault}")
        elif path.suffix == ".json" and path.parent == folder:
            for fault in _settings_faults(path):
                problems.add(where, f"{path} {fault}")
    problems.raise_if_any()


def _settings_faults(path: Path) -> Iterator[str]:
    if path.name.endswith(("tokenizer.json", "vocab.json")):
        return
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return  # the code that reads the file reports this
    if not isinstance(content, dict):
        if path.name == "config.json":
            yield f"must hold settings by name, is {shown(content)}"
        return
    weights = content.get("weight_map") if path.name.endswith(".index.json") else None
    names = weights.values() if isinstance(weights, dict) else ()
    outside = {
        str(name)
        for name in names
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name
    }
    yield from (f"names weights outside of the folder: {shown(name)}" for name in sorted(outside)[:3])
    yield from setting_faults(content)


def setting_faults(settings: Mapping[str, object]) -> Iterator[str]:
    """Faults of a model's settings: names of code, and numbers above `_MOST_OF`."""
    waiting: list[tuple[str, object]] = [("", settings)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            # An attention implementation for each part of the model is one level deeper.
            waiting += [(key if key.endswith("_implementation") else str(own), each) for own, each in value.items()]
        elif isinstance(value, list):
            waiting += [(key, each) for each in value]
        elif isinstance(value, str) and key.endswith("_implementation"):
            if not value.replace("_", "").replace("|", "").isalnum():
                yield f"names code in {key}: {shown(value)}"
        elif isinstance(value, int) and value > _MOST_OF.get(key, value):
            yield f"has {key} {value}, more than {_MOST_OF[key]}"
