"""Output to a terminal: a run's log lines on standard error, a command's result on standard output.

If standard error cannot be written, log lines are lost and the run continues. Text from ledgers, bundles,
configurations and rows is untrusted: it may contain characters that move the cursor, set a title or reverse the text
direction. Both outputs escape these (`legible`).
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
        stream.write(legible(text))
        stream.flush()


def put(*lines: str) -> bool:
    """Write `lines` to standard output, escaped as in `say`. Raises `OutputError` if that fails, as on a full disk.

    Returns False if the reader has closed the pipe, as in `andon predict RUN | head -1`.
    """
    import typer  # needed by commands only

    try:
        typer.echo("\n".join(map(legible_line, lines)))
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
    import subprocess  # most commands do not need it

    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P", "-m", name, *arguments]


def not_written(error: OSError) -> OutputError:
    """The `OutputError` for `error`, which a write to standard output raised."""
    return OutputError(f"cannot write to standard output: {error.strerror}")
