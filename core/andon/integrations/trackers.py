"""Trackers (`run.report_to`): third-party libraries that show a run's metrics, in addition to its own folder.

A tracker never ends a run: if it cannot write, it logs one warning and stops writing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from andon.console.messages import InputError, Problem, install_hint, say

TENSORBOARD, WANDB = "tensorboard", "wandb"


class Tracker:
    """Receives each line of a run's metrics and raises nothing. where: the tracker's name in its warning."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._failed = False

    def line(self, line: Mapping[str, Any]) -> None:
        """Called after a line of metrics is written."""

    def close(self) -> None:
        """Called after the last line; while an exception is handled if it ended the run."""

    def attempt(self, call: Callable[[], None]) -> None:
        """Run `call`. On the first exception, log one warning and skip all later calls."""
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a third-party library may raise anything
            self._failed = True
            say(f"warning: nothing more is written for {self._where}: {error}")


def require(trackers: Sequence[str], quantize: str = "none") -> None:
    """Raise `InputError` for values of `run.report_to` and `model.quantize` whose library is not installed."""
    needed = [("run.report_to", name, name, "") for name in trackers]
    if quantize != "none":
        needed.append(("model.quantize", "bitsandbytes", "qlora", f" ({quantize})"))
    faults = [
        Problem(key, f"{library} is not installed; {install_hint(extra)}{value}")
        for key, library, extra, value in needed
        if find_spec(library) is None
    ]
    if faults:
        raise InputError(faults)


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The floats in a line of metrics, as `training/NAME` or `WHAT/NAME`."""
    of = line.get("what", "training")
    return {f"{of}/{name}": value for name, value in line.items() if isinstance(value, float)}


def writes() -> bool:
    """Whether this process writes: on rank 0, and without a process group."""
    from torch import distributed

    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
