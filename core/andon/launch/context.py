"""Which rank this process is, from the variables that torchrun sets, or our launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from andon.console.problems import ProblemList

RUN_ID = "TORCHELASTIC_RUN_ID"
LAUNCHER = "ANDON_LAUNCHER_PID"
"""The process id of our launcher, which sets it for the fork server and for ranks: their parent is the fork server."""
STORE = "ANDON_STORE"
"""The address of the ranks' `unix_store`; our launcher sets it."""


@dataclass(frozen=True)
class RankContext:
    """One rank's place in the world: 0 <= rank < world_size, 0 <= local_rank < ranks on this host."""

    rank: int
    local_rank: int
    world_size: int
    run_id: str
    launcher_pid: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> RankContext:
        """Read `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `TORCHELASTIC_RUN_ID`; raise `InputError` naming all that is wrong.

        The launcher is this process's parent (torchrun's agent) unless our launcher named itself.
        """
        found = _Variables(os.environ if environ is None else environ)
        world = found.number("WORLD_SIZE", least=1)
        local_world = found.number("LOCAL_WORLD_SIZE", least=1, most=world, default=world)
        rank = found.number("RANK", least=0, most=world - 1)
        local_rank = found.number("LOCAL_RANK", least=0, most=local_world - 1)
        launcher = found.number(LAUNCHER, least=1, default=max(os.getppid(), 1))
        run_id = found.text(RUN_ID)
        found.problems.raise_if_any()
        return cls(rank=rank, local_rank=local_rank, world_size=world, run_id=run_id, launcher_pid=launcher)


def is_rank(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process was started as a rank by torch's launcher (`torchrun`, or `andon.launch`)."""
    return RUN_ID in (os.environ if environ is None else environ)


class _Variables:
    _UNBOUNDED = 1 << 31

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.problems = ProblemList()

    def text(self, name: str) -> str:
        value = self._environ.get(name, "")
        if not value:
            self.problems.add(name, "is not set; start ranks by `andon train --workers N` or by torchrun")
        return value

    def number(self, name: str, *, least: int, most: int | None = None, default: int | None = None) -> int:
        """The variable as an integer; `least` (a harmless stand-in) once a problem was noted."""
        if default is not None and name not in self._environ:
            return default
        text = self.text(name)
        if not text:
            return least if most is None else self._UNBOUNDED
        try:
            value = int(text)
        except ValueError:
            self.problems.add(name, f"must be an integer, not {text!r}")
            return least
        if value < least or (most is not None and value > most):
            top = "" if most is None else f" and at most {most}"
            self.problems.add(name, f"must be at least {least}{top}, not {value}")
            return least
        return value
