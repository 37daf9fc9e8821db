"""Trackers: libraries of others that show what a run measures, beside its own folder (`run.report_to`).

A tracker never ends what it tracks: if it cannot write, one line says so, and it writes no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from andon.console.messages import say
from andon.console.problems import InputError, Problem, install_hint

TENSORBOARD, WANDB = "tensorboard", "wandb"


class Tracker:
    """Receives each line of a run's metrics, and raises nothing. where: what the warning about an error names."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._failed = False

    def line(self, line: Mapping[str, Any]) -> None:
        """A line of metrics was written."""

    def close(self) -> None:
        """There are no more. Called while an exception is handled if the run ended in it."""

    def attempt(self, call: Callable[[], None]) -> None:
        """Run `call`. On the first exception, log one warning and skip all later calls."""
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001 - of whatever libraries: nothing that is tracked ends for it
            self._failed = True
            say(f"warning: no more is written for {self._where}: {error}")


def require(trackers: Sequence[str]) -> None:
    """Raise `InputError` for `run.report_to` with a tracker whose library is not installed."""
    missing = [name for name in trackers if find_spec(name) is None]
    if missing:
        raise InputError(Problem("run.report_to", f"{name} is not installed; {install_hint(name)}") for name in missing)


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The real numbers of a line of metrics, each below what it was measured on."""
    of = line.get("what", "training")
    return {f"{of}/{name}": value for name, value in line.items() if isinstance(value, float)}


def writes() -> bool:
    """Whether this process is the one that writes: rank 0, or no rank at all."""
    from torch import distributed

    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
