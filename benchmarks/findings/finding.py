"""What a finding is: a place in the files of a commit, and the way to show what is wrong there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.findings.checkout import Checkout


@dataclass(frozen=True)
class Shown:
    """What was seen, in lines, and whether the defect is there."""

    stands: bool
    seen: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """One defect. `words` stand in line `line` of `file` at `commit`; `paths` is what showing it needs of the commit.

    Without `paths` it is in an installed library, `commit` is the release, and `file` is where that is installed.
    `issue` is where upstream has been told, or empty where nothing was found.
    """

    name: str
    repository: str
    commit: str
    file: str
    line: int
    words: str
    paths: tuple[str, ...]
    show: Callable[[Checkout], Shown]
    issue: str = ""
