"""All that goes to a terminal: what a run says, on standard error; what a command was asked for, on standard output.

Standard error that takes no more loses its lines; the run goes on without them. Ledgers, bundles, configurations and
rows are anybody's, and text in them may move a cursor, set a title or turn the order of what follows: both ways out
write such characters as escapes (`legible`).
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

    A line break inside a line is escaped. Otherwise text from a file, a path or an exception could add lines that look
    like ours.
    """
    write("".join(f"andon: {legible_line(line)}\n" for line in lines))


def write(text: str, stream: TextIO | None = None) -> None:
    """`text` at once to `stream`, by default standard error, as far as that takes it."""
    with suppress(*BROKEN_STREAM):
        stream = sys.stderr if stream is None else stream
        stream.write(legible(text))
        stream.flush()


def put(*lines: str) -> bool:
    """Write `lines` to standard output; whether anybody still reads: `andon predict RUN | head -1` is no error.

    Each stays one line: a line break in it is written out, so that no text of others can look like a line of ours.
    Raises `OutputError` for a full disk.
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


def not_written(error: OSError) -> OutputError:
    """The error of a command whose standard output refuses its lines with `error`."""
    return OutputError(f"cannot write to standard output: {error.strerror}")
