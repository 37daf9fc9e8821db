"""The registry of clauses, from clauses.toml: what is promised, when it is checked, and what helps if it is broken."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

Kind = Literal["pre", "post", "invariant"]


@dataclass(frozen=True)
class Clause:
    """One promise. Messages show `name`; `aliases` are its ids in the documents that it comes from.

    schedule: when it is checked. likely: the usual cause if it is broken, an inference. remedy: what to try then.
    between_ranks: it compares ranks with each other. of_the_update_before: a violation found before an update is about
    the last update's state.
    """

    name: str
    kind: Kind
    schedule: str
    statement: str
    likely: str
    remedy: str
    aliases: Sequence[str] = ()
    between_ranks: bool = False
    of_the_update_before: bool = False

    def explanation(self) -> Iterator[str]:
        """The rows of `andon explain CLAUSE`."""
        yield f"  likely   {self.likely}  [inference, not proof]"
        yield f"  try      {self.remedy}"
        yield f"  promise  {self.statement}"
        read = "; a watch skips some after the first 64" * self.schedule.startswith(("every step", "every watched"))
        yield f"  checked  {self.schedule}{read}"


_ALL = tomllib.loads(Path(__file__).with_name("clauses.toml").read_text(encoding="utf-8"))
CLAUSES: Mapping[str, Clause] = MappingProxyType({name: Clause(name, **fields) for name, fields in _ALL.items()})
"""Every clause by its name."""
