"""What a command puts on standard output, a line at a time."""

from __future__ import annotations

import typer


def put(line: str) -> bool:
    """Write `line`; whether anybody still reads: `andon predict RUN | head -1` is no error. A full disk raises."""
    try:
        typer.echo(line)
    except BrokenPipeError:
        return False
    return True
