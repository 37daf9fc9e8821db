"""What a person sees while a campaign runs: on a terminal every trial and a bar, elsewhere a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from andon.console.messages import BROKEN_STREAM, say
from andon_contracts.legible import legible_line
from andon_falsify.campaign.trial import Trial
from andon_falsify.campaign.wording import trial_line
from andon_falsify.verdict import Outcome, Verdict

EVERY_S = 30.0
"""Between two lines of a log: often enough to tell a slow campaign from one that hangs."""


class Progress:
    """Standard error, from when a campaign has begun until the context ends."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        """every_s: seconds between two lines where nobody looks on."""
        self._every_s = every_s
        self._began, self._trials, self._done = 0.0, 0, 0
        self._fallen: set[str] = set()
        self._over = threading.Event()
        self._bar: Any = None
        self._speaker = threading.Thread(target=self._speak, daemon=True)

    def __enter__(self) -> Progress:
        """Itself; nothing is shown yet."""
        return self

    def begin(self, trials: int) -> None:
        """There are at most so many trials."""
        self._began, self._trials = time.monotonic(), trials
        if sys.stderr is not None and sys.stderr.isatty():
            self._bar = _bar(trials)
        else:
            self._speaker.start()

    def told(self, trial: Trial, verdicts: Mapping[str, Verdict]) -> None:
        """A trial is over."""
        self._done += 1
        self._fallen |= {name for name, each in verdicts.items() if each.outcome is Outcome.FALSIFIED}
        if self._bar is not None:
            bar, task = self._bar
            with suppress(*BROKEN_STREAM):
                bar.console.print(f"andon: {legible_line(trial_line(trial, verdicts))}", markup=False, highlight=False)
                bar.update(task, completed=self._done, description=self._said())

    def __exit__(self, *_: object) -> None:
        """Take the bar away, or be silent."""
        self._over.set()
        if self._bar is not None:
            with suppress(*BROKEN_STREAM):
                self._bar[0].stop()
            self._bar = None
        elif self._speaker.is_alive():
            self._speaker.join()

    def _speak(self) -> None:
        while not self._over.wait(self._every_s):
            seconds, done = time.monotonic() - self._began, self._done
            left = f" (about {seconds * (self._trials - done) / done:.0f} s left)" if done else ""
            say(f"{done} of {self._trials} trials after {seconds:.0f} s{left}, {self._said()}")

    def _said(self) -> str:
        return f"falsified: {', '.join(sorted(self._fallen))}" if self._fallen else "none falsified"


def _bar(trials: int) -> Any:
    from rich import progress
    from rich.console import Console

    said, times = progress.TextColumn("{task.description}", markup=False), progress.TimeElapsedColumn()
    columns = (said, progress.BarColumn(), progress.MofNCompleteColumn(), times, progress.TimeRemainingColumn())
    bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    return bar, bar.add_task("trials", total=trials)
