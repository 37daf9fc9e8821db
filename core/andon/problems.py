"""All of a user's mistakes in one error, each with its place, its value and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing the user got wrong.

    `where` is a place a reader can go to: `train.csv:17`, `config.yaml:4 optimizer.lr`, `--workers`.
    `what` states the fault with the offending value in it, and the remedy where there is one.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


def install_hint(extra: str) -> str:
    """What brings the libraries of `extra`: Andon is on no package index, so that its name alone brings nothing."""
    return f"run: pip install '.[{extra}]' in a checkout of andon"


class InputError(ValueError):
    """What the user got wrong, all of it at once. The command line prints it and exits with 2."""

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        found = (Problem("", problems),) if isinstance(problems, str) else tuple(problems)
        if not found:
            raise TypeError("an InputError needs at least one problem")
        self.problems: tuple[Problem, ...] = found
        super().__init__("\n".join(map(str, found)))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class ProblemList:
    """Collects problems while reading, so that a user sees all of them and not the first."""

    def __init__(self, limit: int = 20) -> None:
        self._limit = limit
        self._found: list[Problem] = []

    def add(self, where: str, what: str) -> None:
        """Note one problem at `where`."""
        self._found.append(Problem(where, what))

    def __bool__(self) -> bool:
        return bool(self._found)

    def raise_if_any(self) -> None:
        """Raise `InputError` with what was noted (at most `limit` of them, then a count of the rest)."""
        if not self._found:
            return
        shown = self._found[: self._limit]
        rest = len(self._found) - len(shown)
        if rest:
            shown.append(Problem("", f"... and {rest} more problems of this kind"))
        raise InputError(shown)
