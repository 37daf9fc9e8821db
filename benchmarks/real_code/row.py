"""What the table says of a script: where it is, which lines are changed, and which alarms are right, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Patch:
    """`old` becomes `new`; `old` stands exactly once in the file at `path`, by default the script."""

    old: str
    new: str
    path: str = ""


@dataclass(frozen=True)
class Expected:
    """An alarm that is right: a clause, why it is, and the finding that it belongs to, if it is one.

    finding: "" where the sign is there and nobody wrote anything wrong, as a step whose gradients are not finite
    because the loss scale still has to be found. suspected: whether the watch only suspects.
    """

    clause: str
    reason: str
    finding: str = ""
    suspected: bool = False


@dataclass(frozen=True)
class Plant:
    """A mistake that is made on purpose, by patch lines, and the clauses of which any must then be broken."""

    name: str
    patches: tuple[Patch, ...]
    clauses: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One script.

    name: for `--only`. repository: owner/name. path: of the script in it; with module=True run as `-m`. folder: where
    it runs, by default beside the script. parts: which paths of the repository are taken out, by default all.
    gpu: whether it asks for GPUs, and gets CPUs by our preamble. modules: what must be installed. prepare: makes what
    it reads, in the folder where it runs. files: text files of ours, by path in the repository. unseeded: why two runs
    of it differ, if they do; where it does not seed itself the preamble does, each rank by its own number.
    """

    name: str
    repository: str
    commit: str
    path: str
    family: str
    arguments: str = ""
    patches: tuple[Patch, ...] = ()
    folder: str | None = None
    parts: tuple[str, ...] = ()
    module: bool = False
    ranks: int = 2
    gpu: bool = False
    modules: tuple[str, ...] = ()
    prepare: Callable[[Path], None] | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    unseeded: str = ""
    code: int = 0
    expected: tuple[Expected, ...] = ()
    plants: tuple[Plant, ...] = ()
