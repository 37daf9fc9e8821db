"""One attempt: a campaign from its options to what is shown and written of it, or a report that is there already."""

from __future__ import annotations

from pathlib import Path

from andon.console.messages import InputError, put, say
from andon_falsify.campaign.findings import Report
from andon_falsify.campaign.interpreter import Bench, Campaign
from andon_falsify.campaign.request import Options, understood
from andon_falsify.campaign.runner import CutShortError, Listeners, run_campaign
from andon_falsify.campaign.wording import opening_line, verdict_lines
from andon_falsify.cli.command import internal
from andon_falsify.cli.files import ReportFiles
from andon_falsify.cli.progress import Progress
from andon_falsify.cli.stops import code_of, stops
from andon_falsify.report.document import read_json

__all__ = ["Options", "ReportFiles", "make", "read", "show"]


def read(path: Path, files: ReportFiles) -> int:
    """Write what the report in `path` says, and show it; the exit code of its campaign. Raises `InputError`."""
    found = read_json(path)
    files.write(found)
    show(found, files)
    return found.exit_code


def make(options: Options, files: ReportFiles, deadline_s: float | None) -> int:
    """Run the campaign and write what it found; the exit code. Raises `InputError`."""
    request = understood(options)

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
        show(found, files)
    return found.exit_code


def show(report: Report, files: ReportFiles, *, cut_short: bool = False) -> None:
    """On standard output, where nothing that a subject says may move the cursor or hide what stands there."""
    rest = "in the file of --json" if "--json" in files else "--json FILE writes them"
    for line in (*verdict_lines(report, cut_short=cut_short, rest=rest), report.closing_line):
        if not put(line):
            return


def _cut_short(cut: CutShortError, files: ReportFiles) -> int:
    """Write and show what was known when a campaign was ended by what is no finding, and say what that was."""
    try:
        files.write(cut.report)
    except InputError as error:
        say(*map(str, error.problems))
    show(cut.report, files, cut_short=True)
    cause = cut.__cause__
    if not isinstance(cause, KeyboardInterrupt):
        return internal(cause)
    say(cut.report.unfinished)
    return code_of(cause, cut.report.exit_code)
