"""`andon falsify`: the attempt to prove a trainer wrong."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from andon.console.messages import put, say
from andon.console.problems import InputError, Problem
from andon_falsify.cli.stops import code_of, stops

if TYPE_CHECKING:
    from andon_falsify.campaign.findings import Report
    from andon_falsify.campaign.interpreter import Bench, Campaign
    from andon_falsify.campaign.request import Options
    from andon_falsify.campaign.runner import CutShortError
    from andon_falsify.cli.files import ReportFiles

USAGE, INTERNAL = 64, 70
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
        except KeyboardInterrupt as stop:
            say(str(stop) or "interrupted")
            raise typer.Exit(code_of(stop)) from None
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
    name: Annotated[str | None, typer.Option(help="What reports call the subject.")] = None,
    expected_failed: Annotated[
        list[str] | None, typer.Option(help='"CLAIM: REASON": it may fall, and fails nothing then; again for another.')
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="End after so many seconds, with what is known by then.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the report to this file, as JSON, after every trial.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write it as JUnit XML, after every trial.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write it as one HTML page, at the end.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Try nothing: read this report of --json, and write the others of it.")
    ] = None,
) -> None:
    """Try to prove a trainer wrong; 0 all hold, 1 a claim is falsified, 2 one is unknown, 64 usage, 70 internal."""
    from andon_falsify.campaign.request import Options
    from andon_falsify.cli.files import ReportFiles

    paths = {"--json": json, "--junit": junit, "--html": html}
    options = Options(
        subject=subject,
        script=script,
        backend=backend,
        world=world,
        accumulation=accumulation,
        seed=seed,
        budget=budget,
        claims=tuple(claim or ()),
        case=case,
        name=name,
        expected_failed=tuple(expected_failed or ()),
    )
    try:
        if deadline is not None and not 0 < deadline < float("inf"):
            raise InputError([Problem("--deadline", f"must be seconds, more than 0, not {deadline:g}")])
        files = ReportFiles({option: path for option, path in paths.items() if path is not None})
        code = _ended(options, files, deadline) if report is None else _read(report, files)
    except InputError as error:
        _warn(str(error))
        code = USAGE
    raise typer.Exit(code)


falsify.command_class = FalsifyCommand  # type: ignore[attr-defined]


def _read(path: Path, files: ReportFiles) -> int:
    """Write what the report in `path` says, and show it; the exit code of its campaign. Raises `InputError`."""
    from andon_falsify.report.document import read_json

    found = read_json(path)
    files.write(found)
    _show(found, files)
    return found.exit_code


def _ended(options: Options, files: ReportFiles, deadline_s: float | None) -> int:
    """Run the campaign and write what it found; the exit code. Raises `InputError`."""
    from andon_falsify.campaign.request import understood

    request = understood(options)
    from andon_falsify.campaign.runner import CutShortError, Listeners, run_campaign
    from andon_falsify.campaign.wording import opening_line
    from andon_falsify.cli.progress import Progress

    def began(bench: Bench, campaign: Campaign) -> None:
        put(opening_line(bench, campaign))
        progress.begin(len(campaign.trials))

    try:
        with stops(deadline_s), Progress() as progress:
            found = run_campaign(request, Listeners(began, progress.told, files.known if files else None))
    except CutShortError as cut:
        return _cut_short(cut, files)
    try:
        files.write(found)
    finally:
        _show(found, files)
    return found.exit_code


def _show(report: Report, files: ReportFiles, *, cut_short: bool = False) -> None:
    """On standard output, where nothing that a subject says may move the cursor or hide what stands there."""
    from andon_falsify.campaign.wording import verdict_lines

    rest = "in the file of --json" if "--json" in files else "--json FILE writes them"
    for line in (*verdict_lines(report, cut_short=cut_short, rest=rest), report.closing_line):
        if not put(line):
            return


def _warn(text: str) -> None:
    """On standard error, likewise."""
    from andon_contracts.legible import legible

    say(legible(text))


def _cut_short(cut: CutShortError, files: ReportFiles) -> int:
    """Write and show what was known when a campaign was ended by what is no finding, and say what that was."""
    try:
        files.write(cut.report)
    except InputError as error:
        _warn(str(error))
    _show(cut.report, files, cut_short=True)
    cause = cut.__cause__
    if not isinstance(cause, KeyboardInterrupt):
        return _internal(cause)
    say(cut.report.unfinished)
    return code_of(cause, cut.report.exit_code)


def _internal(cause: BaseException | None) -> int:
    """Say what in the suite failed."""
    if os.environ.get(_TRACEBACK) == "1":
        traceback.print_exception(cause)
    _warn(f"internal error: {type(cause).__name__}: {cause} (set {_TRACEBACK}=1 for the traceback)")
    return INTERNAL
