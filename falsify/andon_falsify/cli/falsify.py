"""`andon falsify`: the attempt to prove a trainer wrong."""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from andon.console.messages import InputError, OutputError, Problem, say

USAGE, INTERNAL, _INTERRUPTED = 64, 70, 128 + signal.SIGINT
_TRACEBACK = "ANDON_TRACEBACK"
_USAGE_ERROR, _SHOWN_BY_TYPER = typer.BadParameter.__mro__[1:3]
"""What typer raises for options that it cannot read, and the base class of everything that it prints itself."""


class FalsifyCommand(TyperCommand):
    """A command whose exit codes 1 to 3 are verdicts.

    It ends with 64 if its options cannot be read, and with 70 for an internal error or if standard output is lost.
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
            raise typer.Exit(getattr(stop, "code", _INTERRUPTED)) from None
        except OutputError as error:
            say(*map(str, error.problems))
            raise typer.Exit(INTERNAL) from None
        except Exception as error:
            raise typer.Exit(internal(error)) from error


def internal(error: Exception) -> int:
    """Log an internal error; returns its exit code."""
    if os.environ.get(_TRACEBACK) == "1":
        traceback.print_exception(error)
    say(f"internal error: {type(error).__name__}: {error} (set {_TRACEBACK}=1 for the traceback)")
    return INTERNAL


def falsify(
    subject: Annotated[
        str | None, typer.Option(help="A bundled name, or package.module:make. Default: Andon's own trainer.")
    ] = None,
    script: Annotated[
        str | None, typer.Option(help="A command to train with, with {world}, {local_batch} and {accumulation} in it.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Backends, as in inline,gloo. Default: all here.")] = None,
    world: Annotated[str | None, typer.Option(help="Numbers of ranks, as in 2,3.")] = None,
    accumulation: Annotated[str | None, typer.Option(help="Micro-batches of a rank in one update, as in 1,2.")] = None,
    seed: Annotated[str, typer.Option(help="Random seed, or a range such as 0-199.")] = "0",
    budget: Annotated[str, typer.Option(help="Amount of work: quick, standard or deep.")] = "quick",
    claim: Annotated[list[str] | None, typer.Option(help="Test only this claim. Repeat for more.")] = None,
    case: Annotated[str | None, typer.Option(help="Run exactly this case: JSON, as in 'repeat with'.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the subject in reports.")] = None,
    expected_failed: Annotated[
        list[str] | None,
        typer.Option(help='"CLAIM: REASON": a known failure. Exit code 3 once the claim holds. Repeat for more.'),
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Stop after this many seconds and report the verdicts so far.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the report to this file as JSON, at the end and at intervals.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write it as JUnit XML, at the same times.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write it as one HTML page, at the end.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Run nothing: show a --json report, and write it as --junit or --html. Exits 0.")
    ] = None,
) -> None:
    """Try to prove a trainer wrong.

    Exit codes: 0 all claims hold, 1 one is falsified, 2 one is unknown, 3 one of --expected-failed holds,
    64 wrong arguments, 70 internal error.
    """
    # Not at the top: `andon --help` imports this module, and needs none of these.
    from andon_falsify.campaign.request import read_request
    from andon_falsify.cli import campaign

    paths = {"--json": json, "--junit": junit, "--html": html}
    try:
        if deadline is not None and not 0 < deadline < float("inf"):
            raise InputError([Problem("--deadline", f"must be seconds, more than 0, not {deadline:g}")])
        files = campaign.ReportFiles({option: path for option, path in paths.items() if path is not None})
        if report is not None:
            campaign.reread(report, files)
            raise typer.Exit
        request = read_request(
            subject=subject,
            script=script,
            backend=backend,
            world=world,
            accumulation=accumulation,
            seed=seed,
            budget=budget,
            claims=claim or (),
            case=case,
            name=name,
            expected_failed=expected_failed or (),
        )
        code = campaign.run(request, files, deadline)
    except OutputError:
        raise
    except InputError as error:
        say(*map(str, error.problems))
        code = USAGE
    raise typer.Exit(code)


falsify.command_class = FalsifyCommand  # type: ignore[attr-defined]
