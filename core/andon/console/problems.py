"""All of a user's mistakes in one error, each with its place, its value as messages quote it, and what to do."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from andon_contracts.legible import legible_line

_LONGEST_QUOTE = 60
_ALIKE = 3  # places that are named of one and the same fault


@dataclass(frozen=True)
class Problem:
    """One thing the user got wrong.

    `where` is a place a reader can go to: `train.csv:17`, `config.yaml:4 optimizer.lr`, `--workers`.
    `what` states the fault with the offending value in it, and the remedy where there is one.
    """

    where: str
    what: str

    def __str__(self) -> str:
        # Paths, keys and values are other people's text: with a line break they could add a problem of their own.
        return legible_line(f"{self.where}: {self.what}" if self.where else self.what)


def install_hint(extra: str) -> str:
    """How to get the libraries of `extra`: Andon is on no package index, so that its name alone brings nothing."""
    return f"run: pip install '.[{extra}]' in a checkout of andon"


class InputError(ValueError):
    """All that the user got wrong, at once. The command line prints it and exits with 2.

    Its text has one line for each problem.
    """

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        found = (Problem("", problems),) if isinstance(problems, str) else tuple(problems)
        if not found:
            raise TypeError("an InputError needs at least one problem")
        self.problems: tuple[Problem, ...] = found
        super().__init__("\n".join(map(str, found)))

    @classmethod
    def of_text(cls, text: str) -> InputError:
        """The error of another process whose text, with a line for each problem, is `text`."""
        return cls([Problem("", line) for line in text.split("\n")])

    @property
    def line(self) -> str:
        """All problems on one line, for a message about something else."""
        return "; ".join(map(str, self.problems))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


def is_panic(error: BaseException) -> bool:
    """Whether `error` is a panic of a library in Rust (tokenizers, safetensors), which pyo3 makes no `Exception` of."""
    return type(error).__module__ == "pyo3_runtime"


class ProblemList:
    """Collects problems while reading, so that a user sees all of them and not the first.

    skips: a row that cannot be used is left out. `skipped` has one problem for each such row, in order.
    """

    def __init__(self, limit: int = 20, *, skips: bool = False) -> None:
        self._limit = limit
        self._skips = skips
        self._found: list[Problem] = []
        self.skipped: list[Problem] = []

    def add(self, where: str, what: str) -> None:
        """Note one problem at `where`."""
        self._found.append(Problem(where, what))

    def add_row(self, where: str, what: str) -> None:
        """Note what is wrong with the row at `where`; the row is left out instead if bad rows are skipped."""
        if not self._skips:
            self.add(where, what)
        elif self.skipped and self.skipped[-1].where == where:
            self.skipped[-1] = Problem(where, f"{self.skipped[-1].what}; {what}")
        else:
            self.skipped.append(Problem(where, what))

    def __bool__(self) -> bool:
        return bool(self._found)

    def raise_if_any(self) -> None:
        """Raise `InputError` with what was noted: of one fault the first places and how many more there are, of all
        at most `limit`, then a count of the rest."""
        if not self._found:
            return
        times, last = Counter(map(_fault, self._found)), {_fault(each): each.where for each in self._found}
        seen = Counter[tuple[str, str]]()
        told: list[Problem] = []
        for problem in self._found:
            fault = _fault(problem)
            seen[fault] += 1
            if seen[fault] <= _ALIKE:
                told.append(problem)
            elif seen[fault] == _ALIKE + 1:
                rest = times[fault] - _ALIKE
                told.append(Problem("", f"... and {rest} more of the same, the last at {last[fault]}"))
        shown = told[: self._limit]
        if len(told) > len(shown):
            shown.append(Problem("", f"... and {len(told) - len(shown)} more problems"))
        raise InputError(shown)


def _fault(problem: Problem) -> tuple[str, str]:
    """Lines of one file that are wrong in the same way are one fault. Each setting or variable must be named."""
    file, _, line = problem.where.rpartition(":")
    return (file if line.isdecimal() else problem.where), problem.what


def shown(value: object) -> str:
    """A value as a message quotes it: its `repr`, cut when long (a row of ten megabytes is not repeated)."""
    text = repr(value[: 2 * _LONGEST_QUOTE] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the one of `known` that is nearest to `name`, or nothing when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
