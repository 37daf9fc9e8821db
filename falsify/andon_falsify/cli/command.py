"""How a command that gives verdicts ends, since 1 and 2 are verdicts."""

from __future__ import annotations

import os
import traceback
from typing import Any

import typer
from typer.core import TyperCommand

from andon.console.messages import Exit, OutputError, say
from andon_falsify.cli.stops import code_of

USAGE, INTERNAL = 64, 70
_TRACEBACK = "ANDON_TRACEBACK"
_USAGE_ERROR, _SHOWN_BY_TYPER = typer.BadParameter.__mro__[1:3]
"""What typer raises for options that it cannot read, and all that it shows itself."""


class FalsifyCommand(TyperCommand):
    """A command that gives verdicts, so that 1 and 2 are verdicts.

    It ends with 64 if its options cannot be read, with 2 if standard output takes no more, so that no verdict is known
    to its caller, and with 70 if it fails itself.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if isinstance(error, _USAGE_ERROR):
                error.exit_code = USAGE  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: Any) -> Any:
        """See click."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, _SHOWN_BY_TYPER):  # type: ignore[misc]
            raise
        except KeyboardInterrupt as stop:
            say(str(stop) or "interrupted")
            raise typer.Exit(code_of(stop)) from None
        except OutputError as error:
            say(*map(str, error.problems))
            raise typer.Exit(int(Exit.USAGE)) from None
        except Exception as error:
            raise typer.Exit(internal(error)) from error


def internal(cause: BaseException | None) -> int:
    """Say what in the suite failed; the exit code for it."""
    if os.environ.get(_TRACEBACK) == "1":
        traceback.print_exception(cause)
    say(f"internal error: {type(cause).__name__}: {cause} (set {_TRACEBACK}=1 for the traceback)")
    return INTERNAL
