"""Writes a run's metrics and a watch's findings as TensorBoard event files.

For a watch: `andon.watch(model, optimizer, log=findings("runs/x"))`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from andon.console.messages import InputError
from andon.integrations.trackers import Tracker, numbers, writes
from andon_contracts.record import outside_change


class EventFile(Tracker):
    """One new event file in `folder`. TensorBoard reads it and earlier files there as one run.

    done: steps completed before. Later steps are repeated, so TensorBoard drops their events from earlier files. Every
    event is written at once, so that a killed run has the events of all its steps.
    """

    def __init__(self, folder: Path, done: int = 0) -> None:
        super().__init__(f"TensorBoard in {folder}")
        self._folder, self._done, self._size = folder, done, 0
        self._path: Path | None = None

    def line(self, line: Mapping[str, Any]) -> None:
        self.attempt(lambda: self._append(int(line["step"]), list(numbers(line).items())))

    def finding(self, found: Mapping[str, object]) -> None:
        """The `log` callback of a watch: writes the message as text of its step, tagged with the clause."""
        step = found["andon/step"]
        # Markdown shows text indented by four spaces verbatim.
        text = "".join(f"    {line}\n" for line in str(found["andon/message"]).splitlines())
        tagged = [(f"andon/{found['andon/clause']}", text)]
        self.attempt(lambda: self._append(step if isinstance(step, int) else 0, tagged))

    def _append(self, step: int, values: Sequence[tuple[str, float | str]]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import scalar, text

        events = [
            Event(step=step, summary=scalar(tag, each) if isinstance(each, float) else text(tag, each))
            for tag, each in values
        ]
        if self._path is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files in the order of their names, and a resume may start within the same second.
            seconds, rest = divmod(time.time_ns(), 10**9)
            name = f"events.out.tfevents.{seconds:010d}.{rest:09d}.{socket.gethostname()}.{os.getpid()}"
            self._path = self._folder / name
            again = SessionLog(status=SessionLog.START)
            events = [Event(file_version="brain.Event:2"), Event(step=self._done + 1, session_log=again), *events]
        with self._path.open("ab") as file:
            what = outside_change(file.fileno(), self._path, self._size)
            if what:
                raise InputError.at(self._path, what)
            records = RecordWriter(file)
            for event in events:
                event.wall_time = time.time()
                records.write(event.SerializeToString())
            file.flush()
            self._size = os.fstat(file.fileno()).st_size


def findings(folder: str | os.PathLike[str]) -> Callable[[dict[str, object]], None]:
    """For `andon.watch(log=...)`: writes each finding as text to `folder`, on rank 0 only.

    Call it after the process group is initialized.
    """
    return EventFile(Path(folder)).finding if writes() else lambda found: None
