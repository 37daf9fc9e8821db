"""`andon falsify`: the attempt to prove a trainer wrong."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from andon.console.messages import put, say
from andon.console.problems import InputError, Problem

if TYPE_CHECKING:
    from andon_falsify.campaign.findings import Report
    from andon_falsify.campaign.interpreter import Bench, Campaign
    from andon_falsify.campaign.request import Options
    from andon_falsify.campaign.runner import Listeners
    from andon_falsify.campaign.trial import Trial
    from andon_falsify.verdict import Verdict

USAGE, INTERNAL, INTERRUPTED = 64, 70, 130
_TRACEBACK = "ANDON_TRACEBACK"
_USAGE_ERROR, _SHOWN_BY_TYPER = typer.BadParameter.__mro__[1:3]
"""What typer raises for options that it cannot read, and all that it shows itself."""


class FalsifyCommand(TyperCommand):
    """A command that gives verdicts, so that 1 and 2 are verdicts.

    It ends with 64 where its options cannot be read, and with 70 where it fails itself.
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
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            raise typer.Exit(_internal(error)) from error


def falsify(
    subject: Annotated[
        str | None, typer.Option(help="A bundled name, or package.module:make; our own trainer by default.")
    ] = None,
    script: Annotated[
        str | None, typer.Option(help="A command to train with, with {world}, {local_batch} and {accumulation} in it.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Names, as in inline,gloo; all that this machine has.")] = None,
    world: Annotated[str | None, typer.Option(help="Numbers of ranks, as in 2,3.")] = None,
    accumulation: Annotated[str | None, typer.Option(help="Micro-batches of a rank in an update, as in 1,2.")] = None,
    seed: Annotated[str, typer.Option(help="What cases are drawn from: a number, or several as in 0-199.")] = "0",
    budget: Annotated[str, typer.Option(help="quick, standard or deep.")] = "quick",
    claim: Annotated[list[str] | None, typer.Option(help="Only this claim; again for another.")] = None,
    case: Annotated[str | None, typer.Option(help="Exactly this case, as a counterexample gives it.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file, as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write it as JUnit XML.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write it as one HTML page.")] = None,
) -> None:
    """Try to prove a trainer wrong; 0 all hold, 1 a claim is falsified, 2 one is unknown, 64 usage, 70 internal."""
    from andon_falsify.campaign.request import Options

    options = Options(subject, script, backend, world, accumulation, seed, budget, tuple(claim or ()), case)
    files = {"--json": json, "--junit": junit, "--html": html}
    raise typer.Exit(_ended(options, {option: path for option, path in files.items() if path is not None}))


falsify.command_class = FalsifyCommand  # type: ignore[attr-defined]


def _ended(options: Options, files: dict[str, Path]) -> int:
    """Run the campaign and write what it found; the exit code."""
    from andon_falsify.campaign.request import understood

    try:
        request = understood(options)
        _refuse_unwritable(files)
        from andon_falsify.campaign.runner import CutShortError, run_campaign

        try:
            report = run_campaign(request, _listeners())
        except CutShortError as cut:
            _show(cut.report, files, cut_short=True)
            return _cut_short(cut)
    except InputError as error:
        _warn(str(error))
        return USAGE
    try:
        _write(report, files)
    except InputError as error:
        _warn(str(error))
        return USAGE
    finally:
        _show(report, files)
    return report.exit_code


def _refuse_unwritable(files: dict[str, Path]) -> None:
    """Raises `InputError` before anything is run, where a report could not be written afterwards."""
    wrong = []
    for option, path in files.items():
        if path.is_dir():
            wrong.append(Problem(option, f"{path} is a folder"))
        elif not os.access(path.parent, os.W_OK | os.X_OK):
            there = "cannot be written to" if path.parent.is_dir() else "is no folder"
            wrong.append(Problem(option, f"{path.parent} {there}"))
    if wrong:
        raise InputError(wrong)


def _listeners() -> Listeners:
    """The first line on standard output; a line for each trial where somebody looks at standard error."""
    from andon_falsify.campaign.runner import Listeners
    from andon_falsify.campaign.wording import opening_line, trial_line

    def began(bench: Bench, campaign: Campaign) -> None:
        put(opening_line(bench, campaign))

    def told(trial: Trial, verdicts: dict[str, Verdict]) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            _warn(trial_line(trial, verdicts))

    return Listeners(began, told)  # type: ignore[arg-type]


def _show(report: Report, files: dict[str, Path], *, cut_short: bool = False) -> None:
    """On standard output, where nothing that a subject says may move the cursor or hide what stands there."""
    from andon_falsify.campaign.wording import verdict_lines

    rest = "in the file of --json" if "--json" in files and not cut_short else "--json FILE writes them"
    for line in (*verdict_lines(report, cut_short=cut_short, rest=rest), report.closing_line):
        if not put(line):
            return


def _warn(text: str) -> None:
    """On standard error, likewise."""
    from andon_contracts.legible import legible

    say(legible(text))


def _write(report: Report, files: dict[str, Path]) -> None:
    from andon_falsify.report.document import write_json
    from andon_falsify.report.junit import write_junit
    from andon_falsify.report.page import write_html

    writers = {"--json": write_json, "--junit": write_junit, "--html": write_html}
    for option, path in files.items():
        writers[option](report, path)


def _cut_short(cut: BaseException) -> int:
    """Say what ended the campaign that is no finding."""
    cause = cut.__cause__
    if isinstance(cause, KeyboardInterrupt):
        say("interrupted")
        return INTERRUPTED
    return _internal(cause)


def _internal(cause: BaseException | None) -> int:
    """Say what in the suite failed."""
    if os.environ.get(_TRACEBACK) == "1":
        traceback.print_exception(cause)
    _warn(f"internal error: {type(cause).__name__}: {cause} (set {_TRACEBACK}=1 for the traceback)")
    return INTERNAL
