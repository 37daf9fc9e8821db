"""A YAML document as plain values, each with its line; nothing in it can run code or eat memory.

Scalars are those of YAML 1.2's core schema, so that `1e-3` is a number and `no` a word. Tags are refused, a key twice
in one mapping too, and what aliases expand to is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from andon.console.problems import InputError, Problem, ProblemList, shown

MOST_BYTES = 2**18
MOST_VALUES = 10_000
DEEPEST = 32

KeyPath = tuple[str, ...]


class _CoreLoader(yaml.SafeLoader):
    """Scalars as YAML 1.2's core schema reads them."""


_CoreLoader.yaml_implicit_resolvers = {}


_PREFIX = "tag:yaml.org,2002:"
_SIGNS_AND_DIGITS = list("-+.0123456789")
_CoreLoader.add_implicit_resolver(f"{_PREFIX}null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
_CoreLoader.add_implicit_resolver(
    f"{_PREFIX}bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), ["t", "T", "f", "F"]
)
_CoreLoader.add_implicit_resolver(
    f"{_PREFIX}int", re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), list("-+0123456789")
)
_CoreLoader.add_implicit_resolver(
    f"{_PREFIX}float",
    re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
    _SIGNS_AND_DIGITS,
)


@dataclass
class Document:
    """`value`: dicts, lists and scalars. `lines`: the line, from 1, of each key and item by its path."""

    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int | None:
        """The line of `path` or of the nearest thing around it; None when there is neither."""
        around = (path[:end] for end in range(len(path), 0, -1))
        return next((self.lines[each] for each in around if each in self.lines), None)


def parse(text: str, where: str, problems: ProblemList) -> Document:
    """The one document in `text`. Faults of its form are noted in `problems` at `where`:LINE, and left out.

    Raises `InputError` when it is no YAML, too long, too deep, or expands to too much.
    """
    if len(text) > MOST_BYTES:
        raise InputError([Problem(where, f"is longer than {MOST_BYTES} characters ({len(text)})")])
    try:
        _require_shallow(text, where)
        node = yaml.compose(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}:{mark.line + 1}" if mark is not None else where
        column = f" at column {mark.column + 1}" if mark is not None else ""
        raise InputError([Problem(place, f"malformed YAML: {error.problem or error.context}{column}")]) from error
    except yaml.YAMLError as error:
        raise InputError([Problem(where, f"malformed YAML: {str(error).splitlines()[0]}")]) from error
    reader = _Reader(where, problems)
    value = reader.read(node, ()) if node is not None else None
    return Document(value, reader.lines)


def _require_shallow(text: str, where: str) -> None:
    """Raise `InputError` for a document that is too deep, before anything recurses into it."""
    depth = 0
    for event in yaml.parse(text, Loader=_CoreLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            mark = event.start_mark
            place = where if mark is None else f"{where}:{mark.line + 1}"
            raise InputError([Problem(place, f"is nested deeper than {DEEPEST} levels")])


class _Reader:
    """Walks the nodes of a document, counting every visit: an alias is walked again each time it is used."""

    def __init__(self, where: str, problems: ProblemList) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._where = where
        self._problems = problems
        self._visited = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        self._visited += 1
        if self._visited > MOST_VALUES:
            raise InputError([Problem(self._at(node), f"holds more than {MOST_VALUES} values, aliases expanded")])
        if len(path) > DEEPEST:
            raise InputError([Problem(self._at(node), f"is nested deeper than {DEEPEST} levels")])
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_PREFIX}map":
            return dict(self._pairs(node, path))
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_PREFIX}seq":
            return [self._item(each, (*path, str(place))) for place, each in enumerate(node.value)]
        return self._scalar(node, path)

    def _at(self, node: yaml.Node) -> str:
        return f"{self._where}:{node.start_mark.line + 1}"

    def _item(self, node: yaml.Node, path: KeyPath) -> Any:
        self.lines[path] = node.start_mark.line + 1
        return self.read(node, path)

    def _pairs(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, Any]]:
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self._problems.add(self._at(key), "a key must be a word")
            elif key.value in first:
                name = ".".join((*path, key.value))
                self._problems.add(f"{self._at(key)} {name}", f"is there already, on line {first[key.value]}")
            else:
                first[key.value] = self.lines[*path, key.value] = line
                yield key.value, self.read(value, (*path, key.value))

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        text, kind = node.value, node.tag.removeprefix(_PREFIX)
        reads = _SCALARS.get(kind)
        try:
            if reads is not None and len(text) <= _LONGEST_SCALAR.get(kind, MOST_BYTES):
                return reads(text)
            fault = f"the tag !{kind} is not supported" if reads is None else f"too long a number ({shown(text)})"
        except ValueError:
            fault = f"{shown(text)} is no {kind}"
        self._problems.add(f"{self._at(node)} {'.'.join(path)}".rstrip(), fault)
        return None


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": _truth,
    "int": lambda text: int(text, 0) if text[:2] in ("0o", "0x") else int(text),
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    "str": str,
}
_LONGEST_SCALAR = {"int": 400, "float": 400}


class _CoreDumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as something else."""


_CoreDumper.yaml_implicit_resolvers = {
    first: [
        *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
        *_CoreLoader.yaml_implicit_resolvers.get(first, []),
    ]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_CoreLoader.yaml_implicit_resolvers}
}


# Line breaks of YAML 1.1: written as they are, they come back folded into spaces.
_FOLDED = re.compile("[\x85\u2028\u2029]")


def dump(value: Any, *, flow: bool = False) -> str:
    """YAML that `parse` reads back to the same plain values, with keys in the order given; `flow`: on one line."""
    text = _written(value, flow=flow, readable=True)
    return _written(value, flow=flow, readable=False) if _FOLDED.search(text) else text


def _written(value: Any, *, flow: bool, readable: bool) -> str:
    text: str = yaml.dump(
        value, Dumper=_CoreDumper, sort_keys=False, allow_unicode=readable, width=10**6, default_flow_style=flow
    )
    return text
