"""What a user reads: log lines on standard error, results on standard output, problems of an input, and exit codes.

If standard error cannot be written, log lines are lost and the run continues. Text from ledgers, bundles,
configurations and rows is untrusted: it may contain characters that move the cursor, set a title or reverse the text
direction. Both outputs escape these (`legible`).

Exit codes: 0 is success, 2 a mistake of the user (input, configuration, an unwritable or full disk). The others
classify how a run failed or ended early, with the number of sysexits if one fits.
"""

from __future__ import annotations

import difflib
import logging
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self, TextIO

from andon_contracts.legible import legible, legible_line

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


def silence_bitsandbytes() -> None:
    """Keep bitsandbytes from logging, before peft imports it. It recommends another package on some CPUs, and logs a
    traceback if its library for GPUs is missing. `model.quantize` reports what matters."""
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)


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


@contextmanager
def reading(path: Path, otherwise: str = "") -> Iterator[None]:
    """Context manager: turn an `OSError` while `path` is read into an `InputError`; and, if `otherwise` says what the
    file is not, a `ValueError` or `RecursionError` too."""
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise InputError.at(path, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        if not otherwise:
            raise
        raise InputError.at(path, f"{otherwise}: {error}") from error


def is_panic(error: BaseException) -> bool:
    """Whether `error` is a panic of a Rust library (tokenizers, safetensors): pyo3 derives it from `BaseException`."""
    return type(error).__module__ == "pyo3_runtime"


class ProblemList:
    """Collects problems while reading, so that a user sees all of them and not only the first.

    skips: skip unusable rows; `add_row` then records one problem for each such row in `skipped`, in order.
    """

    def __init__(self, limit: int = 20, *, skips: bool = False) -> None:
        self._limit = limit
        self.skips = skips
        self._found: list[Problem] = []
        self.skipped: list[Problem] = []

    def add(self, where: str, what: str) -> None:
        """Record one problem at `where`."""
        self._found.append(Problem(where, what))

    def add_row(self, where: str, what: str) -> None:
        """Record a problem of the row at `where`: in `skipped` if unusable rows are skipped, otherwise as an error."""
        if not self.skips:
            self.add(where, what)
        elif self.skipped and self.skipped[-1].where == where:
            self.skipped[-1] = Problem(where, f"{self.skipped[-1].what}; {what}")
        else:
            self.skipped.append(Problem(where, what))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Context manager: record the problems of an `InputError` that is raised inside, and continue after it."""
        try:
            yield
        except InputError as error:
            self._found += error.problems

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
    file, _, line = problem.where.rpartition(":")
    return (file if line.isdecimal() else problem.where), problem.what


def shown(value: object) -> str:
    """`repr(value)` for a message, cut if long (a row may have ten megabytes)."""
    text = repr(value[: 2 * _LONGEST_QUOTE] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?` for the element of `known` closest to `name`; empty if none is close."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


class Exit(IntEnum):
    """Exit code of Andon's processes."""

    OK = 0
    CRASHED = 1  # an unexpected exception; of `andon doctor`: training cannot run here
    USAGE = 2  # bad input: arguments, configuration, data, run folder, disk
    VIOLATION = 70  # a contract was broken; the step was discarded
    RANK_LOST = 71  # a rank died (signal, out of memory) or could not be reached
    RANK_SILENT = 72  # a rank missed its deadline
    PREEMPTED = 75  # a signal ended it: at a step boundary, with a checkpoint to resume from, or before training
    INTERRUPTED = 130  # SIGINT ended it before training, or in a command without step boundaries


BROKEN_STREAM = (OSError, ValueError)
"""Exceptions of a write to a stream that is full, closed, or without a reader."""


class OutputError(InputError):
    """Standard output cannot be written to, so the result of the command is lost."""


def say(*lines: str) -> None:
    """Log `lines` to standard error with the prefix `andon: `, in one write so that lines of ranks do not interleave.

    Line breaks inside a line are escaped, so that text from a file, a path or an exception cannot forge log lines.
    """
    write("".join(f"andon: {legible_line(line)}\n" for line in lines))


def write(text: str, stream: TextIO | None = None) -> None:
    """Write `text` to `stream` (default: standard error) and flush it. Errors of the stream are ignored."""
    with suppress(*BROKEN_STREAM):
        stream = sys.stderr if stream is None else stream
        # Another process may be drawing a progress bar in this line of the terminal.
        erase = "\r\x1b[K" if stream is sys.__stderr__ and moves_cursor(sys.__stderr__) else ""
        stream.write(erase + legible(text))
        stream.flush()


def moves_cursor(stream: TextIO | None) -> bool:
    """Whether `stream` is a terminal in which a line can be redrawn."""
    with suppress(*BROKEN_STREAM):
        return stream is not None and stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return False


def put(*lines: str) -> bool:
    """Write `lines` to standard output, escaped as in `say`. Raises `OutputError` if that fails, as on a full disk.

    Returns False if the reader has closed the pipe, as in `andon predict RUN | head -1`.
    """
    try:
        sys.stdout.write("\n".join(map(legible_line, lines)) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        return False
    except OSError as error:
        raise not_written(error) from error
    return True


def command_line(*words: str | Path) -> str:
    """Quote `words` as a command that can be pasted into a shell.

    A relative path that begins with a dash gets the prefix `./`, so that it is not parsed as an option.
    """
    return shlex.join(f"./{word}" if isinstance(word, Path) and str(word)[:1] == "-" else str(word) for word in words)


def module_command(name: str, *arguments: str) -> list[str]:
    """The command that runs the module `name` with this interpreter and its flags (-O, -W, -X ...).

    -P keeps the current folder, which may be an untrusted run folder, off `sys.path`. -I would also ignore PYTHONPATH,
    which may be how Python finds Andon.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P", "-m", name, *arguments]


def not_written(error: OSError) -> OutputError:
    """The `OutputError` for `error`, which a write to standard output raised."""
    return OutputError(f"cannot write to standard output: {error.strerror}")
