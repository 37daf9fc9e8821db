"""Runs a campaign for the command line: shows its progress, writes its reports and prints its verdicts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from andon.console.messages import InputError, Problem, put, say
from andon_falsify.campaign.classes import Class, ClassCampaign, Classes
from andon_falsify.campaign.request import Request
from andon_falsify.campaign.run import Campaign, opened
from andon_falsify.campaign.trial import RESUME, Trial
from andon_falsify.report.document import read_json, write_json
from andon_falsify.report.findings import Report, verdict_lines
from andon_falsify.report.junit import write_junit
from andon_falsify.report.markdown import write_markdown
from andon_falsify.verdict import Outcome, Verdict

_UNKNOWN = 2
_EVERY_S = 30.0
"""The shortest time between log lines. A line is logged only after another trial has ended."""
_SHARE = 20
"""Reports are written when another 1 / _SHARE of the trials so far has ended; each is made of all of these trials."""


class ReportFiles:
    """The files of `--json`, `--junit`, `--markdown` and `--html`, by option."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        """Raises `InputError` if one could not be written at the end."""
        wrong = []
        for option, path in paths.items():
            if path.is_dir():
                wrong.append(Problem(option, f"{path} is a folder"))
            elif not os.access(path.parent, os.W_OK | os.X_OK):
                there = "cannot be written to" if path.parent.is_dir() else "is not a folder"
                wrong.append(Problem(option, f"{path.parent} {there}"))
        if wrong:
            raise InputError(wrong)
        self.paths = paths
        self._refused: set[str] = set()

    def write(self, report: Report, *, html: bool = True) -> None:
        """Raises `InputError` for the first file that cannot be written."""
        writers = {"--json": write_json, "--junit": write_junit, "--markdown": write_markdown}
        for option, path in self.paths.items():
            if option in writers:
                writers[option](report, path)
            elif html:
                from andon_falsify.report.page import write_html

                write_html(report, path)

    def write_so_far(self, campaign: Campaign | ClassCampaign) -> None:
        """Write the files that can be read before the end. An error is logged once, and the next call tries again."""
        try:
            if self.paths.keys() - {"--html"}:
                self.write(campaign.report("the campaign is still running", explained=False), html=False)
        except InputError as error:
            if str(error) not in self._refused:
                self._refused.add(str(error))
                say(*map(str, error.problems))


def run(request: Request | Classes, files: ReportFiles, deadline_s: float | None) -> int:
    """Run the campaign, write and print its report; the exit code. Raises `InputError`.

    What ends a campaign early is raised after its report was written: an interruption, or an internal error.
    """
    cut: BaseException | None = None
    opening: AbstractContextManager[Campaign | ClassCampaign] = (
        opened(request) if isinstance(request, Request) else nullcontext(ClassCampaign(request))
    )
    with stops(deadline_s), Progress() as progress, opening as campaign:
        put(campaign.opening_line)
        progress.begin([*map(_weight, campaign.trials)])
        try:
            written = 0
            files.write_so_far(campaign)
            judged: Iterator[tuple[Trial | Class, Mapping[str, Verdict]]] = campaign.run()
            for done, (trial, verdicts) in enumerate(judged, start=1):
                progress.told(trial, verdicts)
                if done - written >= max(1, done // _SHARE):
                    written = done
                    files.write_so_far(campaign)
            report = campaign.report()
        except KeyboardInterrupt as stop:
            cut, report = stop, campaign.report(str(stop) or "interrupted")
        except Exception as error:  # noqa: BLE001 -- what was found before an internal error is reported
            cut, report = error, campaign.report(f"internal error: {type(error).__name__}: {error}")
    try:
        files.write(report)
    except InputError as error:
        if cut is None:
            show(report, files)
            raise
        say(*map(str, error.problems))
    show(report, files, cut_short=cut is not None)
    if isinstance(cut, StoppedError) and cut.code == _UNKNOWN:
        cut.code = report.exit_code
    if cut is not None:
        raise cut
    return report.exit_code


class StoppedError(KeyboardInterrupt):
    """A signal or the deadline ended the campaign. code: the exit code."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)
        self.code = code


@contextmanager
def stops(deadline_s: float | None) -> Iterator[None]:
    """Raise `StoppedError` in the main thread for SIGTERM, or after `deadline_s` seconds; the second is ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}

    def stop(number: int, _: Any) -> None:
        for each in held:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGTERM:
            raise StoppedError("ended by SIGTERM", 128 + signal.SIGTERM)
        raise StoppedError(f"the deadline of {deadline_s:g} s is over", _UNKNOWN)

    for number in held:
        signal.signal(number, stop)
    signal.setitimer(signal.ITIMER_REAL, deadline_s or 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in held.items():
            signal.signal(number, handler)


def reread(path: Path, files: ReportFiles) -> None:
    """Write and print the report in `path`. Raises `InputError`."""
    report = read_json(path)
    files.write(report)
    show(report, files)


def show(report: Report, files: ReportFiles, *, cut_short: bool = False) -> None:
    """Print a report, with the characters escaped that could act on a terminal."""
    rest = "in the file of --json" if "--json" in files.paths else "--json FILE writes them"
    for line in (*verdict_lines(report, cut_short=cut_short, rest=rest), report.closing_line):
        if not put(line):
            return


def _weight(trial: Trial | Class) -> int:
    """About how long a trial takes: by ranks that start; a resume is a whole run, two that are killed, and the last."""
    return len(trial.members) if isinstance(trial, Class) else trial.case.world * (4 if trial.kind == RESUME else 1)


class Progress:
    """Shows progress on standard error until the context ends: a line for every trial on a terminal, else fewer."""

    def __init__(self) -> None:
        self._began, self._took, self._weights, self._done = 0.0, 0.0, list[int](), 0
        self._fallen: set[str] = set()
        self._at_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._over = threading.Event()
        self._logger = threading.Thread(target=self._log, daemon=True)

    def __enter__(self) -> Progress:
        return self

    def begin(self, weights: list[int]) -> None:
        self._began, self._weights = time.monotonic(), weights
        if not self._at_terminal:
            self._logger.start()

    def told(self, trial: Trial | Class, verdicts: Mapping[str, Verdict]) -> None:
        self._done, self._took = self._done + 1, time.monotonic() - self._began
        self._fallen |= {name for name, each in verdicts.items() if each.outcome is Outcome.FALSIFIED}
        if self._at_terminal:
            outcomes = [each.outcome for each in verdicts.values()]
            counts = ", ".join(f"{outcomes.count(each)} {each.value}" for each in Outcome if each in outcomes)
            say(f"{trial.title}: {counts}; {self._summary()}")

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._logger.is_alive():
            self._logger.join()

    def _log(self) -> None:
        shown = 0
        while not self._over.wait(_EVERY_S):
            if (done := self._done) > shown:
                shown = done
                say(self._summary())

    def _summary(self) -> str:
        """`2 of 8 trials after 60 s (about 180 s left), none falsified`. The estimate is from trials that ended."""
        took, done, trials = self._took, self._done, len(self._weights)
        rest = took * sum(self._weights[done:]) / max(1, sum(self._weights[:done]))
        left = f" (about {rest:.0f} s left)" if 0 < done < trials else ""
        fallen = f"falsified: {', '.join(sorted(self._fallen))}" if self._fallen else "none falsified"
        then = "; searching for smaller counterexamples" if self._fallen and done == trials else ""
        return f"{done} of {trials} trials after {took:.0f} s{left}, {fallen}{then}"
