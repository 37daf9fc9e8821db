"""`andon falsify`: the attempt to prove a trainer wrong."""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.exceptions import Exit as Ended

from andon.console.messages import InputError, OutputError, Problem, say

USAGE, INTERNAL, _INTERRUPTED = 64, 70, 128 + signal.SIGINT
_TRACEBACK = "ANDON_TRACEBACK"


class FalsifyCommand(click.Command):
    """A command whose exit codes 1 to 3 are verdicts.

    It ends with 64 if its options cannot be read, and with 70 for an internal error or if standard output is lost.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.exit_code = USAGE  # type: ignore[misc]
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (Ended, click.Abort, click.ClickException):
            raise
        except KeyboardInterrupt as stop:
            say(str(stop) or "interrupted")
            raise Ended(getattr(stop, "code", _INTERRUPTED)) from None
        except OutputError as error:
            say(*map(str, error.problems))
            raise Ended(INTERNAL) from None
        except Exception as error:
            raise Ended(internal(error)) from error


def internal(error: Exception) -> int:
    """Log an internal error; returns its exit code."""
    if os.environ.get(_TRACEBACK) == "1":
        traceback.print_exception(error)
    say(f"internal error: {type(error).__name__}: {error} (set {_TRACEBACK}=1 for the traceback)")
    return INTERNAL


@click.command(cls=FalsifyCommand)
@click.argument("file", type=Path, required=False, help="Equivalence classes of command lines (YAML).")
@click.option("--only", multiple=True, metavar="CLASS", help="Run only this class of FILE. Repeat for more.")
@click.option("--subject", help="A bundled name, or package.module:make. Default: Andon's own trainer.")
@click.option("--script", help="A command to train with, with {world}, {local_batch} and {accumulation} in it.")
@click.option("--backend", help="Backends, as in inline,gloo. Default: all here.")
@click.option("--world", help="Numbers of ranks, as in 2,3.")
@click.option("--accumulation", help="Micro-batches of a rank in one update, as in 1,2.")
@click.option("--seed", default="0", help="Random seed, or a range such as 0-199.")
@click.option("--budget", default="quick", help="Amount of work: quick, standard or deep.")
@click.option("--claim", "claims", multiple=True, help="Test only this claim. Repeat for more.")
@click.option("--case", help="Run exactly this case: JSON, as in 'repeat with'.")
@click.option("--name", help="Name of the subject in reports.")
@click.option(
    "--expected-failed",
    multiple=True,
    help='"CLAIM: REASON": a known failure. Exit code 3 once the claim holds. Repeat for more.',
)
@click.option("--deadline", type=float, help="Stop after this many seconds and report the verdicts so far.")
@click.option("--json", type=Path, help="Write the report to this file as JSON, at the end and at intervals.")
@click.option("--junit", type=Path, help="Write it as JUnit XML, at the same times.")
@click.option("--markdown", type=Path, help="Write it as a table in Markdown, at the same times.")
@click.option("--html", type=Path, help="Write it as one HTML page, at the end.")
@click.option(
    "--report",
    type=Path,
    help="Run nothing: show a --json report, and write it as --junit, --markdown or --html. Exits 0.",
)
def falsify(
    file: Path | None,
    only: tuple[str, ...],
    deadline: float | None,
    json: Path | None,
    junit: Path | None,
    markdown: Path | None,
    html: Path | None,
    report: Path | None,
    **options: Any,
) -> None:
    """Try to prove a trainer wrong.

    Exit codes: 0 all claims that apply hold, 1 one is falsified, 2 one is unknown, none applies or the deadline passed,
    3 one of --expected-failed holds, 64 wrong arguments, 70 internal error, 130 Ctrl-C, 143 SIGTERM.
    """
    # Not at the top: `andon --help` imports this module, and needs none of these.
    from andon_falsify.campaign.classes import Classes, read_classes
    from andon_falsify.campaign.request import Request, read_request
    from andon_falsify.cli import campaign

    paths = {"--json": json, "--junit": junit, "--markdown": markdown, "--html": html}
    try:
        if deadline is not None and not 0 < deadline < float("inf"):
            raise InputError([Problem("--deadline", f"must be seconds, more than 0, not {deadline:g}")])
        files = campaign.ReportFiles({option: path for option, path in paths.items() if path is not None})
        if report is not None:
            campaign.reread(report, files)
            raise Ended
        source = click.get_current_context().get_parameter_source
        given = {name for name in options if source(name) is ParameterSource.COMMANDLINE}
        if file is None and only:
            raise InputError.at("--only", "needs a FILE of classes")
        if wrong := sorted(given - {"budget", "seed"}) if file is not None else []:
            names = [f"--{'claim' if name == 'claims' else name.replace('_', '-')}" for name in wrong]
            raise InputError([Problem(name, f"does not apply to {file}: remove it") for name in names])
        if file is None:
            request: Request | Classes = read_request(**options)
        else:
            budget, seed = (options[name] if name in given else None for name in ("budget", "seed"))
            request = read_classes(file, budget, seed, only)
        code = campaign.run(request, files, deadline)
    except OutputError:
        raise
    except InputError as error:
        say(*map(str, error.problems))
        code = USAGE
    raise Ended(code)
