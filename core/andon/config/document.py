"""Parses an untrusted YAML document to plain values with line numbers. It cannot run code or use much memory.

Scalars follow YAML 1.2's core schema, so `1e-3` is a number and `no` a string. Tags and duplicate keys are refused, and
the limits count an alias each time it is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from andon.console.problems import InputError, ProblemList, shown

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


def parse(text: str, where: str, problems: ProblemList) -> tuple[Any, Mapping[KeyPath, int]]:
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
