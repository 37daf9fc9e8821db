"""Loads a configuration from an untrusted YAML file, `--set` overrides and flags, and reports all problems at once.

Parsing a file cannot run code or use much memory. Scalars follow YAML 1.2's core schema, so `1e-3` is a number and `no`
a string. Tags and duplicate keys are refused, and the limits count an alias each time it is used. A key either defines
the run, and must stay the same on resume, or only places it.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from andon.config.schema import CLASSIFICATION, ONE_FILE, SEVERAL_FILES, Config, Run, Section, TrainFile
from andon.config.source import require_file
from andon.console.messages import InputError, Problem, ProblemList, did_you_mean, reading, shown

MOST_BYTES = 2**18
MOST_VALUES = 10_000
DEEPEST = 32
_LONGEST_NUMBER = 400

KeyPath = tuple[str, ...]

_PREFIX = "tag:yaml.org,2002:"
_PATTERNS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
_READERS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": lambda text: int(text, 0) if text[:2] in ("0o", "0x") else int(text),
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    "str": str,
}


class _CoreLoader(yaml.SafeLoader):
    """Scalars as YAML 1.2's core schema reads them."""


class _CoreDumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as something else."""


_CoreLoader.yaml_implicit_resolvers = {
    None: [(f"{_PREFIX}{kind}", re.compile(rf"(?:{pattern})\Z")) for kind, pattern in _PATTERNS.items()]
}
_CoreDumper.yaml_implicit_resolvers = yaml.SafeDumper.yaml_implicit_resolvers | _CoreLoader.yaml_implicit_resolvers


def parse(text: str, where: str, problems: ProblemList) -> tuple[Any, dict[KeyPath, int]]:
    """Parse the one document in `text` to dicts, lists and scalars; also return the line (from 1) of each key path.

    Tags, duplicate keys and bad scalars are added to `problems` at `where`:LINE, without their values. Raises
    `InputError` for text that is malformed, too long, too deep, or expands to too many values.
    """
    if len(text) > MOST_BYTES:
        raise InputError.at(where, f"is longer than {MOST_BYTES} characters ({len(text)})")
    too_deep = f"is nested deeper than {DEEPEST} levels"
    try:
        root = yaml.compose(text, Loader=_CoreLoader)
    except RecursionError as error:
        raise InputError.at(where, too_deep) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or getattr(error, "context", None) or str(error).splitlines()[0]
        place, column = (where, "") if mark is None else (f"{where}:{mark.line + 1}", f" at column {mark.column + 1}")
        raise InputError.at(place, f"malformed YAML: {what}{column}") from error
    lines: dict[KeyPath, int] = {}
    visited = 0

    def read(node: yaml.Node, path: KeyPath) -> Any:
        """Convert a node. A node that aliases repeat is converted, and counted, each time."""
        nonlocal visited
        visited += 1
        place = f"{where}:{node.start_mark.line + 1}"
        if visited > MOST_VALUES:
            raise InputError.at(place, f"holds more than {MOST_VALUES} values, aliases expanded")
        kind = node.tag.removeprefix(_PREFIX)
        collection = isinstance(node, yaml.CollectionNode)
        if len(path) + collection > DEEPEST:
            raise InputError.at(place, too_deep)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            mapping: dict[str, Any] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if not isinstance(key, yaml.ScalarNode):
                    problems.add(f"{where}:{line}", "a key must be a word")
                    continue
                own = (*path, key.value)
                if key.value in mapping:
                    problems.add(f"{where}:{line} {'.'.join(own)}", f"is there already, on line {lines[own]}")
                else:
                    lines[own] = line
                    mapping[key.value] = read(value, own)
            return mapping
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            paths = [(*path, str(number)) for number in range(len(node.value))]
            lines.update(zip(paths, (item.start_mark.line + 1 for item in node.value), strict=True))
            return [read(item, own) for item, own in zip(node.value, paths, strict=True)]
        fault = f"the tag !{kind} is not supported"
        if kind in _READERS and not collection:
            try:
                if kind == "str" or len(node.value) <= _LONGEST_NUMBER:
                    return _READERS[kind](node.value)
                fault = f"too long a number ({shown(node.value)})"
            except (ValueError, KeyError):
                fault = f"{shown(node.value)} is not a valid {kind}"
        problems.add(f"{place} {'.'.join(path)}".rstrip(), fault)
        return None

    return None if root is None else read(root, ()), lines


def dump(value: Any, *, flow: bool = False) -> str:
    """YAML that `parse` reads back to the same plain values. Keeps the order of keys. flow: on one line."""

    def written(*, readable: bool) -> Any:
        return yaml.dump(
            value, Dumper=_CoreDumper, sort_keys=False, allow_unicode=readable, width=10**6, default_flow_style=flow
        )

    text: str = written(readable=True)
    # Unescaped line breaks of YAML 1.1 would be read back as spaces.
    return str(written(readable=False)) if re.search("[\x85\u2028\u2029]", text) else text


_HEAD = """\
# Every setting of a run at its default. Keys that are left out keep their defaults.
# Train with: andon train config.yaml [--workers N] [--set KEY=VALUE]
"""
_COMMENT_COLUMN = 36
FLAGS = {"run.workers": "--workers", "run.backend": "--backend", "run.resume": "--resume", "run.dir": "--run-dir"}
FLAGS |= {"task": "--task", "data.train": "--data", "data.eval": "--eval-data", "model.base": "--model"}
FLAGS |= {
    "data.validation": "--validation-data",
    "data.text_column": "--text-column",
    "data.label_column": "--label-column",
}
"""Command-line flags, by the dotted key that they set."""

_MEANT = {
    ("adapter", "targets"): "must be all-linear, or a list of module names",
    ("run", "devices"): "must be a list of devices, each cpu or the index of a GPU",
}
"""Messages for keys of more than one type, since pydantic's errors for each type would confuse."""
_WANTED = {"float_type": "a number", "int_type": "an integer", "bool_type": "true or false"}
_WANTED |= {"string_type": "a string", "tuple_type": "a list", "model_type": "a section with keys"}
_BOUNDS = {"greater_than": "more than", "greater_than_equal": "at least"}
_BOUNDS |= {"less_than": "less than", "less_than_equal": "at most"}
_KINDS = {str: "the string ", bool: "", dict: "the section ", list: "the list ", tuple: "the list "}

_SECTIONS = {name: part for name, part in Config() if isinstance(part, Section)}
_KEYS: list[KeyPath] = [
    path for name, _ in Config() for path in ((name,), *((name, key) for key, _ in _SECTIONS.get(name, ())))
]
_BY_ANSWER = tomllib.loads((files("andon.config") / "foreign_names.toml").read_text(encoding="utf-8"))
FOREIGN_NAMES: Mapping[str, str] = {name: meant for meant, names in _BY_ANSWER.items() for name in names.split()}
"""By setting of the HF Trainer, TRL or Axolotl: Andon's key, or a sentence if none corresponds."""


class SettingsError(InputError):
    """Wrong settings. usable: the others, or None if they fit no run. sections: those of the wrong ones."""

    usable: Config | None = None
    sections: frozenset[str] = frozenset()


def load_config(path: Path | None, overrides: Sequence[str] = (), flags: Mapping[str, object] | None = None) -> Config:
    """Load the configuration at `path` (None: all defaults), then apply `overrides`, then `flags`.

    overrides: KEY=VALUE with a dotted key and a YAML value; later ones win. flags: values by dotted key; None is
    ignored. An empty section or file keeps its defaults.

    Raises `InputError` for an unreadable file, else `SettingsError`, with every problem, each at file:line and key,
    `--set KEY`, or the flag: duplicate or unknown keys (with the nearest known one), wrong types, values out of bounds.
    """
    problems = ProblemList()
    values, lines = dict[str, Any](), dict[KeyPath, int]()
    with problems.collecting():
        values, lines = ({}, {}) if path is None else _read(Path(path), problems)
    unread = bool(problems) and not values
    # An empty section, as `optimizer:`, keeps its defaults.
    tree = {key: value for key, value in values.items() if value is not None or key not in Config.model_fields}
    origins: dict[KeyPath, str] = {}

    def set_value(key: str, value: object, where: str) -> None:
        path, section = tuple(key.split(".")), tree
        for depth, name in enumerate(path[:-1], start=1):
            inner = section.setdefault(name, {})
            if not isinstance(inner, dict):
                problems.add(where, f"{'.'.join(path[:depth])} must be a section, is {shown(inner)}")
                return
            section = inner
        section[path[-1]] = value
        origins[path] = where

    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            problems.add(f"--set {shown(override)}", "must be KEY=VALUE, as in optimizer.lr=1e-3")
            continue
        try:
            set_value(key, parse(text, f"--set {key}", problems)[0], f"--set {key}")
        except InputError as error:
            for problem in error.problems:
                problems.add(f"--set {key}", problem.what)
    for key, value in (flags or {}).items():
        if value is not None:
            set_value(key, value, FLAGS.get(key, f"--set {key}"))
    if unread:  # other settings may be wrong only because the file's are missing
        problems.raise_if_any()
    wrong = set[KeyPath]()
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        for key_path, what in _faults(error):
            problems.add(_where(key_path, path, lines, origins), what)
            wrong |= {key_path[:2]} if key_path else set()  # without a path, the whole is no mapping
    try:
        problems.raise_if_any()
    except InputError as error:
        refused = SettingsError(error.problems)
        refused.sections = frozenset(section for section, *_ in wrong)
        for key_path in wrong:
            inner = tree.get(key_path[0])
            if len(key_path) > 1 and isinstance(inner, dict):
                inner.pop(key_path[1], None)
            else:
                tree.pop(key_path[0], None)
        with suppress(ValidationError):
            refused.usable = Config.model_validate(tree)
        raise refused from error
    return config


def config_from(values: Mapping[str, object]) -> Config:
    """Validate `values` by section and key. Raises `InputError` with every problem, by dotted key."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise InputError([Problem(".".join(key_path), what) for key_path, what in _faults(error)]) from error


def to_yaml(config: Config) -> str:
    """Every key of `config` as YAML; `load_config` reads it back to an equal configuration."""
    return dump(config.model_dump(mode="json"))


def _read(path: Path, problems: ProblemList) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    if path.suffix.lower() in (".csv", ".tsv", ".jsonl", ".parquet"):
        raise InputError.at(path, f"is a data file, and a configuration is YAML; did you mean --data {path}?")
    require_file(path, empty=True)
    with reading(path), path.open("rb") as file:
        content = file.read(4 * MOST_BYTES + 4)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"not UTF-8: byte 0x{content[error.start]:02x} at byte {error.start} of the file"
        line = content[: error.start].count(b"\n") + 1
        raise InputError.at(f"{path}:{line}", what) from error
    values, lines = parse(text, str(path), problems)
    if not isinstance(values, dict | None):
        raise InputError.at(f"{path}:1", f"must hold keys and values, is {shown(values)}")
    return values or {}, lines


def _where(key_path: KeyPath, path: Path | None, lines: Mapping[KeyPath, int], origins: Mapping[KeyPath, str]) -> str:
    """The last override or flag that set `key_path`, else the line of the key or an enclosing one, else the key."""
    name, around = ".".join(key_path), [key_path[:end] for end in range(len(key_path), 0, -1)]
    places = [origins[each] for each in around if each in origins]
    places += [f"{path}:{lines[each]} {name}" for each in around if each in lines]
    places += [where for each, where in origins.items() if each[: len(key_path)] == key_path]
    return places[0] if places else name


def _faults(error: ValidationError) -> Iterator[tuple[KeyPath, str]]:
    seen: set[KeyPath] = set()
    for details in error.errors(include_url=False):
        # Without the union tag that pydantic adds after the key.
        key_path = tuple(str(part) for part in details["loc"] if part not in (ONE_FILE, SEVERAL_FILES))
        if details["type"] == "beside":
            key_path = (*key_path, *str(details["ctx"]["key"]).split("."))
        elif key_path[:2] in _MEANT:
            key_path = key_path[:2]
        if key_path not in seen:
            seen.add(key_path)
            yield key_path, _what(key_path, details)


def _what(key_path: KeyPath, details: ErrorDetails) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "beside":
        return str(context["what"])
    if kind == "extra_forbidden":
        return f"unknown key{_suggestion(key_path, value)}"
    if key_path in _MEANT:
        return f"{_MEANT[key_path]} ({shown(value)})"
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}, is {_KINDS.get(type(value), '')}{shown(value)}"
    if kind == "string_unicode":
        return f"is not UTF-8 ({shown(value)}); a configuration is UTF-8, so rename the file or folder"
    if kind == "literal_error":
        section: Any = getattr(Config(), key_path[0])
        automatic = "'auto', " if key_path[-1] in getattr(section, "automatic", ()) else ""
        choices = f"{automatic}{context['expected']}"
        names = choices.replace(" or ", ", ").replace("'", "").split(", ")
        return f"must be {choices} ({shown(value)}){did_you_mean(value, names) if isinstance(value, str) else ''}"
    if kind in _BOUNDS:
        (bound,) = context.values()
        return f"must be {_BOUNDS[kind]} {f'{bound:g}' if isinstance(bound, float) else bound} ({shown(value)})"
    return f"{details['msg'][:1].lower()}{details['msg'][1:]} ({shown(value)})"


def _suggestion(path: KeyPath, value: object) -> str:
    if path[:2] == ("data", "train"):
        return f"; known here: {', '.join(TrainFile.model_fields)}"
    if meant := meant_by(path[-1]):
        return f"; did you mean {meant!r}?" if " " not in meant else f"; {meant}"
    siblings = {each[-1]: ".".join(each) for each in _KEYS if each[:-1] == path[:-1]}
    for names in (siblings, {each[-1]: ".".join(each) for each in _KEYS}):
        if near := did_you_mean(path[-1], names):
            name = names[near.split("'")[1]]
            inner = [f"{name}.{key}" for key in value if (name, key) in _KEYS] if isinstance(value, dict) else []
            return f"; did you mean {inner[0] if len(inner) == 1 else name!r}?"
    return f"; known here: {', '.join(siblings) or 'nothing'}"


def meant_by(name: str) -> str:
    """The dotted key with this name in any section, else what `FOREIGN_NAMES` has for it; empty for an unknown name."""
    for path in sorted(_KEYS, key=lambda path: -len(path)):
        if path[-1] == name and name not in _SECTIONS:
            return ".".join(path)
    return FOREIGN_NAMES.get(name, "")


def template() -> str:
    """A config.yaml with every key at its default and commented."""
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
            # As the only entry of a list, which keeps it on one line.
            value = "auto" if automatic else dump([plain[name]], flow=True).strip()[1:-1]
            setting = f"{indent}{name}: {value}"
            yield f"{setting:<{_COMMENT_COLUMN}}# {field.description}" if field.description else setting


_OF_DATA = ("train", "validation", "eval", "text_column", "text_pair_column", "label_column", "label_separator")
NAMING = frozenset(f"data.{key}" for key in _OF_DATA) | {"model.base", "model.revision", "adapter.init"}
"""Keys that name data and models. These may move, so the digests of their contents are compared instead."""
PLACING = NAMING.union(
    ("data.cache", "training.keep_checkpoints", "training.checkpoint_every", "training.checkpoint_minutes"),
    ("contracts.enabled", "contracts.base_every", "contracts.audit_every", "contracts.audit_coverage"),
    (f"run.{key}" for key in Run.model_fields if key != "portable"),
)
"""Keys that may change between a run and its resume."""


def identity(config: Config) -> dict[str, Any]:
    """JSON values, by dotted key, that define the run: every key that is not in `PLACING`, and some derived ones.

    `data.embedded`, `model.embedded`: whether the embedded data and model are used. `adapter.new`: whether the adapter
    is a new one. `data.weights`: weights of the training files, unless it is one file of weight 1. `run.device_kind`:
    results have the same bits on any number of devices of one kind, but not across kinds.
    """
    defining = {key: value for key, value in by_dotted_key(config).items() if key not in PLACING}
    defining["task"] = config.task or CLASSIFICATION
    if config.training.compile == "off":
        # Recomputing changes bits only in compiled passes, where other operations may be fused.
        defining.pop("training.activation_checkpointing", None)
    weights = [file.weight for file in config.data.files]
    if weights not in ([], [1.0]):
        defining["data.weights"] = weights
    return defining | {
        "data.embedded": config.data.train is None,
        "model.embedded": config.model.base is None,
        "adapter.new": config.adapter.init is None,
        "run.device_kind": device_kind(config.run),
    }


def by_dotted_key(config: Config) -> dict[str, Any]:
    """Every setting of `config` as a JSON value."""
    values: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        values |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return values


def device_kind(run: Run) -> str:
    """The kind of a run's devices: cpu, cuda or mixed."""
    if run.devices:
        kinds = {"cpu" if str(name) == "cpu" else "cuda" for name in run.devices}
        return kinds.pop() if len(kinds) == 1 else "mixed"
    return {"nccl": "cuda", "mixed": "mixed"}.get(run.backend, "cpu")


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, value before, value now) of each key that differs, sorted; None for a key that is absent."""
    return [
        (key, was.get(key), now.get(key)) for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)
    ]


def config_digest(config: Config) -> str:
    """SHA-256 (hex) of `identity(config)`: the same wherever the run is placed."""
    text = json.dumps(identity(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
