"""A configuration from a YAML file, `--set` overrides and flags, with everything wrong in them at once; and the
commented configuration that `andon init` writes, made from the schema so that it cannot fall behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from andon.config.document import MOST_BYTES, Document, KeyPath, dump, parse
from andon.config.foreign_names import FOREIGN_NAMES
from andon.config.schema import ONE_FILE, SEVERAL_FILES, Config, Section, TrainFile
from andon.config.source import require_file
from andon.console.problems import InputError, Problem, ProblemList, did_you_mean, shown

_HEAD = """\
# Every setting of a run at its default. Keys that are left out keep their defaults.
# Train with: andon train config.yaml [--workers N] [--set KEY=VALUE]
"""
_COMMENT_COLUMN = 36
FLAGS = {
    "run.workers": "--workers",
    "run.backend": "--backend",
    "run.resume": "--resume",
    "run.dir": "--run-dir",
    "task": "--task",
    "data.train": "--data",
    "data.eval": "--eval-data",
    "data.text_column": "--text-column",
    "data.label_column": "--label-column",
    "model.base": "--model",
}
"""What the command line calls the keys that have a flag of their own."""

_MEANT = {
    ("adapter", "targets"): "must be all-linear, or a list of module names",
    ("run", "devices"): "must be a list of devices, each cpu or the index of a GPU",
}
"""Keys that take more than one type; what each type says of them would confuse."""
_WANTED = {
    "float_type": "a number",
    "int_type": "an integer",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "model_type": "a section with keys",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_KINDS = {str: "the string ", bool: "", dict: "the section ", list: "the list ", tuple: "the list "}


def load_config(path: Path | None, overrides: Sequence[str] = (), flags: Mapping[str, object] | None = None) -> Config:
    """The configuration in `path` (all defaults without one), changed by `overrides`, changed by `flags`.

    `overrides` are KEY=VALUE with a dotted key and a YAML value, a later one before an earlier. `flags` are values by
    dotted key; None stands for a flag that was not given. A section or file with nothing in it keeps its defaults.

    Raises `InputError` with every problem found, each at file:line and key, `--set KEY`, or the flag: unreadable or
    malformed YAML, a key twice, unknown keys (with the nearest known one), wrong types, values out of bounds.
    """
    problems = ProblemList()
    document = _read(Path(path), problems) if path is not None else Document({})
    # `optimizer:` with nothing below it says nothing.
    tree = {key: value for key, value in document.value.items() if value is not None or key not in Config.model_fields}
    said: dict[KeyPath, str] = {}
    for override in overrides:
        _override(tree, override, said, problems)
    for key, value in (flags or {}).items():
        if value is not None:
            flag = FLAGS.get(key, f"--set {key}")
            _put(tree, tuple(key.split(".")), value, flag, said, problems)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        for key_path, what in _faults(error):
            problems.add(_where(key_path, path, document, said), what)
        problems.raise_if_any()
        raise
    problems.raise_if_any()
    return config


def config_from(values: Mapping[str, object]) -> Config:
    """The configuration of a caller's values by section and key. Raises `InputError` with every problem, by key."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = [Problem(".".join(key_path), what) for key_path, what in _faults(error)]
        raise InputError(problems) from error


def to_yaml(config: Config) -> str:
    """Every key of `config` as YAML; `load_config` reads it back to the same."""
    return dump(config.model_dump(mode="json"))


def _read(path: Path, problems: ProblemList) -> Document:
    require_file(path, empty=True)
    try:
        with path.open("rb") as file:
            content = file.read(4 * MOST_BYTES + 4)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise InputError([Problem(str(path), f"cannot be read: {error.strerror or error}")]) from error
    except UnicodeDecodeError as error:
        what = f"not UTF-8: byte 0x{content[error.start]:02x} at byte {error.start} of the file"
        line = content[: error.start].count(b"\n") + 1
        raise InputError([Problem(f"{path}:{line}", what)]) from error
    document = parse(text, str(path), problems)
    if document.value is None:
        return Document({})
    if not isinstance(document.value, dict):
        raise InputError([Problem(f"{path}:1", f"must hold keys and values, is {shown(document.value)}")])
    return document


def _override(tree: dict[str, Any], override: str, said: dict[KeyPath, str], problems: ProblemList) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    where = f"--set {key}"
    if not equals or not all(key.split(".")):
        problems.add(f"--set {shown(override)}", "must be KEY=VALUE, as in optimizer.lr=1e-3")
        return
    try:
        value = parse(text, where, problems).value
    except InputError as error:
        for problem in error.problems:
            problems.add(where, problem.what)
        return
    _put(tree, tuple(key.split(".")), value, where, said, problems)


def _put(
    tree: dict[str, Any], path: KeyPath, value: object, where: str, said: dict[KeyPath, str], problems: ProblemList
) -> None:
    section = tree
    for depth, name in enumerate(path[:-1], start=1):
        inner = section.setdefault(name, {})
        if not isinstance(inner, dict):
            problems.add(where, f"{'.'.join(path[:depth])} is no section, it is {shown(inner)}")
            return
        section = inner
    section[path[-1]] = value
    said[path] = where


def _where(key_path: KeyPath, path: Path | None, document: Document, said: Mapping[KeyPath, str]) -> str:
    """Where a reader corrects the value at `key_path`: what was said last, the line in the file, or the key alone."""
    for end in range(len(key_path), 0, -1):
        if key_path[:end] in said:
            return said[key_path[:end]]
    line = document.line(key_path)
    if line is None:
        below = [where for each, where in said.items() if each[: len(key_path)] == key_path]
        return below[0] if below else ".".join(key_path)
    return f"{path}:{line} {'.'.join(key_path)}"


def _faults(error: ValidationError) -> Iterator[tuple[KeyPath, str]]:
    seen: set[KeyPath] = set()
    for details in error.errors(include_url=False):
        key_path = _key_path(details)
        if key_path not in seen:
            seen.add(key_path)
            yield key_path, _what(key_path, details)


def _key_path(details: ErrorDetails) -> KeyPath:
    """The key itself: pydantic goes on with the type that it tried."""
    location = tuple(str(part) for part in details["loc"] if part not in (ONE_FILE, SEVERAL_FILES))
    if details["type"] == "beside":
        return (*location, *str(details["ctx"]["key"]).split("."))
    return location[:2] if location[:2] in _MEANT else location


def _what(key_path: KeyPath, details: ErrorDetails) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "beside":
        return str(context["what"])
    if kind == "extra_forbidden":
        return f"unknown key{_suggestion(key_path)}"
    if key_path in _MEANT:
        return f"{_MEANT[key_path]} ({shown(value)})"
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}, is {_KINDS.get(type(value), '')}{shown(value)}"
    if kind == "string_unicode":
        return f"is not UTF-8 ({shown(value)}); a configuration is UTF-8, so rename the file or folder"
    if kind == "literal_error":
        choices = str(context["expected"])
        names = choices.replace(" or ", ", ").replace("'", "").split(", ")
        return f"must be {choices} ({shown(value)}){did_you_mean(value, names) if isinstance(value, str) else ''}"
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        bound = context[name]
        return f"must be {words} {f'{bound:g}' if isinstance(bound, float) else bound} ({shown(value)})"
    return f"{details['msg'][:1].lower()}{details['msg'][1:]} ({shown(value)})"


def _suggestion(path: KeyPath) -> str:
    """The key that was meant: the same name elsewhere, what another trainer's name means, else the nearest name."""
    if path[:2] == ("data", "train"):
        return f"; known here: {', '.join(TrainFile.model_fields)}"
    known = _known_keys()
    meant = meant_by(path[-1])
    if meant:
        return f"; did you mean {meant!r}?" if " " not in meant else f"; {meant}"
    beside = {each[-1]: ".".join(each) for each in known if each[:-1] == path[:-1]}
    anywhere = {each[-1]: ".".join(each) for each in known}
    for names in (beside, anywhere):
        if near := did_you_mean(path[-1], names):
            name = near.split("'")[1]
            return f"; did you mean {names[name]!r}?"
    return f"; known here: {', '.join(beside) or 'nothing'}"


def meant_by(name: str) -> str:
    """The dotted key of this name in any section, else what another trainer's setting of this name is called here, or a
    sentence if no key means the same; empty for an unknown name."""
    sections = {each[0] for each in _known_keys() if len(each) > 1}
    key = next((".".join(each) for each in _known_keys() if each[-1] == name and each != (name,)), "")
    if not key and name in Config.model_fields.keys() - sections:
        return name
    return key or FOREIGN_NAMES.get(name, "")


def _known_keys() -> list[KeyPath]:
    known: list[KeyPath] = []
    for name, section in Config.model_fields.items():
        known.append((name,))
        if isinstance(section.annotation, type) and issubclass(section.annotation, BaseModel):
            known += ((name, key) for key in section.annotation.model_fields)
    return known


def template() -> str:
    """The text of a config.yaml that `load_config` reads back to the defaults."""
    return _HEAD + "\n".join(_entries(Config(), "")) + "\n"


def _entries(values: Section, indent: str) -> Iterator[str]:
    plain = values.model_dump(mode="json")
    for name, field in type(values).model_fields.items():
        inner = getattr(values, name)
        if isinstance(inner, Section):
            about = " ".join((type(inner).__doc__ or "").split())
            yield f"\n# {about}\n{name}:"
            yield from _entries(inner, indent + "  ")
        else:
            automatic = name in type(values).automatic and name not in values.model_fields_set
            # As the only entry of a list, so that it is one line.
            value = "auto" if automatic else dump([plain[name]], flow=True).strip()[1:-1]
            setting = f"{indent}{name}: {value}"
            yield f"{setting:<{_COMMENT_COLUMN}}# {field.description}" if field.description else setting
