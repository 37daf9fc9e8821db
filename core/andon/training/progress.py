"""What is seen while a run trains: a bar on a terminal, a plain line every N steps otherwise, or JSON for a machine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from andon.console.messages import BROKEN_STREAM, write
from andon.metrics.scores import Scores
from andon.run.summary import quoted
from andon.step.plan import GlobalBatch
from andon.step.step import StepResult

_SILENT_S = 12.0
"""The longest time without a line: an update of a large model can take minutes, and its log is not a hung run."""


class ProgressView:
    """Lines on standard error that a log can hold and `grep` can find; a rich bar where that is a terminal."""

    def __init__(
        self, total_steps: int, log_every: int, mode: str = "auto", done: int = 0, *, counts_right: bool = True
    ) -> None:
        """mode: auto (a bar on a terminal), always (a bar), never (lines), quiet (nothing), json (lines of metrics on
        standard output, and nothing else). done: steps already taken.

        counts_right: as a `ScoredTask` says it.
        """
        self._counts_right = counts_right
        self._mode = mode
        self._total = total_steps
        self._every = log_every
        self._started = self._last_line = time.perf_counter()
        self._done_before = done
        self._bar: Any = None
        if mode == "always" or (mode == "auto" and _on_a_terminal()):
            self._bar = _bar(total_steps, done)

    def step(self, batch: GlobalBatch, result: StepResult) -> None:
        """One update was done."""
        if self._bar is not None:
            bar, task = self._bar
            with suppress(*BROKEN_STREAM):
                bar.update(task, completed=result.step, description=f"epoch {batch.epoch} loss {result.loss:.4f}")
        elif self._is_shown(result.step) or time.perf_counter() - self._last_line > _SILENT_S:
            rate = (result.step - self._done_before) / (time.perf_counter() - self._started)
            right = f"train_acc {result.correct / max(result.terms, 1):.3f} " if self._counts_right else ""
            self._line(
                f"step {result.step}/{self._total} epoch {batch.epoch} loss {result.loss:.4f} {right}"
                f"grad_norm {result.grad_norm:.3f} "
                f"lr {result.rate:.2e} {rate:.3g} steps/s"
            )

    def evaluated(self, step: int, scores: Scores, what: str) -> None:
        """Rows were scored."""
        loss = f" loss {scores.loss:.4f}" if scores.loss is not None else ""
        told = " ".join(f"{word} {value:.4f}" for word, value in quoted(scores.as_dict()).items())
        self._line(f"{what} after step {step}: {told}{loss} ({scores.rows} rows)")

    def measured(self, line: Mapping[str, Any]) -> None:
        """A line of the metrics was written: of an update, or of scores."""
        if self._mode == "json" and ("what" in line or self._is_shown(line["step"])):
            write(f"{json.dumps(line)}\n", sys.stdout)

    def _is_shown(self, step: int) -> bool:
        return step % self._every == 0 or step == self._total

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            with suppress(*BROKEN_STREAM):
                self._bar[0].stop()
            self._bar = None

    def _line(self, text: str) -> None:
        if self._mode in ("quiet", "json"):
            return
        self._last_line = time.perf_counter()
        if self._bar is not None:
            with suppress(*BROKEN_STREAM):
                self._bar[0].console.print(text)
        else:
            write(f"{text}\n")


def _on_a_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except ValueError:  # it was closed
        return False


def _bar(total: int, done: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    bar.start()
    return bar, bar.add_task("starting", total=total, completed=done)
