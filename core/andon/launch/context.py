"""This process's rank, from the environment variables of torchrun or of our launcher."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from andon.console.problems import ProblemList

RUN_ID = "TORCHELASTIC_RUN_ID"
LAUNCHER = "ANDON_LAUNCHER_PID"
"""The process id of our launcher. Ranks cannot take it from their parent, which is the fork server."""
STORE = "ANDON_STORE"  # the address of the ranks' `unix_store`; our launcher sets it

_MOST = 1 << 31


@dataclass(frozen=True)
class RankContext:
    """One rank: 0 <= rank < world_size, 0 <= local_rank < ranks on this host."""

    rank: int
    local_rank: int
    world_size: int
    run_id: str
    launcher_pid: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> RankContext:
        """Read `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `TORCHELASTIC_RUN_ID`; raise `InputError` listing all problems.

        The launcher is this process's parent (torchrun's agent) unless `LAUNCHER` names ours.
        """
        variables = os.environ if environ is None else environ
        problems = ProblemList()
        unset = "is not set; start ranks by `andon train --workers N` or by torchrun"

        def number(name: str, least: int, most: int = _MOST, default: int | None = None) -> int:
            """The variable as an integer; `most` (a harmless stand-in) if it is invalid."""
            text = variables.get(name, "")
            if name not in variables and default is not None:
                return default
            if not text:
                problems.add(name, unset)
            elif not re.fullmatch(r"\s*[+-]?\d+\s*", text):
                problems.add(name, f"must be an integer, not {text!r}")
            elif least <= int(text) <= most:
                return int(text)
            else:
                top = "" if most == _MOST else f" and at most {most}"
                problems.add(name, f"must be at least {least}{top}, not {int(text)}")
            return most

        world = number("WORLD_SIZE", 1)
        local_world = number("LOCAL_WORLD_SIZE", 1, world, default=world)
        rank = number("RANK", 0, world - 1)
        local_rank = number("LOCAL_RANK", 0, local_world - 1)
        launcher = number(LAUNCHER, 1, default=max(os.getppid(), 1))
        if not variables.get(RUN_ID):
            problems.add(RUN_ID, unset)
        problems.raise_if_any()
        return cls(rank, local_rank, world, variables[RUN_ID], launcher)


def is_rank(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process was started as a rank by torch's launcher (`torchrun`, or `andon.launch`)."""
    return RUN_ID in (os.environ if environ is None else environ)
