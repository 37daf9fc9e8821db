"""Input errors: every problem of an input in one exception, with its place, the offending value and a remedy."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from andon_contracts.legible import legible_line

_LONGEST_QUOTE = 60
_ALIKE = 3  # places listed for one fault


@dataclass(frozen=True)
class Problem:
    """One thing the user got wrong.

    `where` locates it, as `train.csv:17`, `config.yaml:4 optimizer.lr` or `--workers`.
    `what` states the fault, the offending value and, if known, a remedy.
    """

    where: str
    what: str

    def __str__(self) -> str:
        # Paths, keys and values are untrusted: a line break in them could forge another problem.
        return legible_line(f"{self.where}: {self.what}" if self.where else self.what)


def install_hint(extra: str) -> str:
    """The command that installs the extra `extra`, from a checkout since Andon is not on a package index."""
    return f"run: pip install '.[{extra}]' in a checkout of andon"


class InputError(ValueError):
    """All problems of an input, one on each line of its text. The command line prints them and exits with 2."""

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        entries = (Problem("", problems),) if isinstance(problems, str) else tuple(problems)
        if not entries:
            raise TypeError("an InputError needs at least one problem")
        self.problems: tuple[Problem, ...] = entries
        super().__init__("\n".join(map(str, entries)))

    @classmethod
    def at(cls, where: object, what: str) -> Self:
        """The error of the single problem `what` at `where`."""
        return cls([Problem(str(where), what)])

    @classmethod
    def of_text(cls, text: str) -> InputError:
        """Rebuild the error of another process from its text, which has one problem on each line."""
        return cls([Problem("", line) for line in text.split("\n")])

    @property
    def line(self) -> str:
        """All problems on one line, to be quoted inside another message."""
        return "; ".join(map(str, self.problems))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


def is_panic(error: BaseException) -> bool:
    """Whether `error` is a panic of a Rust library (tokenizers, safetensors): pyo3 derives it from `BaseException`."""
    return type(error).__module__ == "pyo3_runtime"


class ProblemList:
    """Collects problems while reading, so that a user sees all of them and not only the first.

    skips: skip unusable rows; `add_row` then records one problem for each such row in `skipped`, in order.
    """

    def __init__(self, limit: int = 20, *, skips: bool = False) -> None:
        self._limit = limit
        self._skips = skips
        self._found: list[Problem] = []
        self.skipped: list[Problem] = []

    def add(self, where: str, what: str) -> None:
        """Record one problem at `where`."""
        self._found.append(Problem(where, what))

    def add_row(self, where: str, what: str) -> None:
        """Record a problem of the row at `where`: in `skipped` if unusable rows are skipped, otherwise as an error."""
        if not self._skips:
            self.add(where, what)
        elif self.skipped and self.skipped[-1].where == where:
            self.skipped[-1] = Problem(where, f"{self.skipped[-1].what}; {what}")
        else:
            self.skipped.append(Problem(where, what))

    def __bool__(self) -> bool:
        return bool(self._found)

    def raise_if_any(self) -> None:
        """Raise `InputError` if problems were recorded. It lists the first places of each fault, and at most `limit`
        lines, each time with a count of the rest."""
        if not self._found:
            return
        times, last = Counter(map(_fault, self._found)), {_fault(each): each.where for each in self._found}
        seen = Counter[tuple[str, str]]()
        listed: list[Problem] = []
        for problem in self._found:
            fault = _fault(problem)
            seen[fault] += 1
            if seen[fault] <= _ALIKE:
                listed.append(problem)
            elif seen[fault] == _ALIKE + 1:
                rest = times[fault] - _ALIKE
                listed.append(Problem("", f"... and {rest} more of the same, the last at {last[fault]}"))
        shown = listed[: self._limit]
        if len(listed) > len(shown):
            shown.append(Problem("", f"... and {len(listed) - len(shown)} more problems"))
        raise InputError(shown)


def _fault(problem: Problem) -> tuple[str, str]:
    """Key that groups problems: the same message in one file. Settings and variables stay separate."""
    file, _, line = problem.where.rpartition(":")
    return (file if line.isdecimal() else problem.where), problem.what


def shown(value: object) -> str:
    """`repr(value)` for a message, cut if long (a row may have ten megabytes)."""
    text = repr(value[: 2 * _LONGEST_QUOTE] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the element of `known` closest to `name`; empty if none is close."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
