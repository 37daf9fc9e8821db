"""Output to a terminal: a run's log lines on standard error, a command's result on standard output.

If standard error takes no more, its lines are lost and the run goes on. Ledgers, bundles, configurations and rows are
other people's, and text in them may move a cursor, set a title or turn the order of what follows: both ways out write
such characters as escapes (`legible`).
"""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from andon.console.problems import InputError
from andon_contracts.legible import legible, legible_line

BROKEN_STREAM = (OSError, ValueError)
"""What writing to a stream raises whose reader has gone, that is full, or that was closed."""


class OutputError(InputError):
    """Standard output cannot be written to, so the result of the command is lost."""


def say(*lines: str) -> None:
    """Write each line with the command's name in front, all in one write: lines of ranks do not come in between.

    A line break inside a line is escaped, so that text from a file, a path or an exception cannot add lines of ours.
    """
    write("".join(f"andon: {legible_line(line)}\n" for line in lines))


def write(text: str, stream: TextIO | None = None) -> None:
    """`text` at once to `stream`, by default standard error, as far as that takes it."""
    with suppress(*BROKEN_STREAM):
        stream = sys.stderr if stream is None else stream
        stream.write(legible(text))
        stream.flush()


def put(*lines: str) -> bool:
    """Write `lines` to standard output, as `say` does. Raises `OutputError` for a full disk.

    Returns whether anybody still reads: `andon predict RUN | head -1` is no error.
    """
    import typer  # which a run without commands does without

    try:
        typer.echo("\n".join(map(legible_line, lines)))
    except BrokenPipeError:
        return False
    except OSError as error:
        raise not_written(error) from error
    return True


def command_line(*words: str | Path) -> str:
    """The words as a command that can be pasted into a shell.

    A relative path that begins with a dash gets `./` in front, so that it is not read as an option.
    """
    return shlex.join(f"./{word}" if isinstance(word, Path) and str(word)[:1] == "-" else str(word) for word in words)


def module_command(name: str, *arguments: str) -> list[str]:
    """The command that runs the module `name` with this interpreter and its flags (-O, -W, -X ...).

    With -P, Python does not look for modules in the current folder: it may be somebody else's run folder. Not with -I,
    which would also ignore PYTHONPATH, where Andon itself may be found.
    """
    import subprocess  # which most commands do without

    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P", "-m", name, *arguments]


def not_written(error: OSError) -> OutputError:
    """The error of a command whose standard output refuses its lines with `error`."""
    return OutputError(f"cannot write to standard output: {error.strerror}")
