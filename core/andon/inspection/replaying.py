"""`andon replay`: where it runs, and that nothing of it lands in the run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from andon.console.exits import Exit
from andon.console.problems import InputError, Problem
from andon.inspection.difference import Differences
from andon.inspection.recorded import open_recorded
from andon.launch.launcher import launch
from andon.launch.portable import chosen

ENTRY = "andon.inspection.replay:replay_rank"


class ReplayFailed(RuntimeError):
    """The ranks that were to do the steps again ended otherwise; the message says how."""

    def __init__(self, message: str, ends_with: Exit) -> None:
        super().__init__(message)
        self.ends_with = ends_with


def replay_run(path: Path, steps: str, workers: int | None, backend: str | None) -> Differences:
    """Do the steps `steps` (A:B) of the run at `path` again and say what differs from its ledger.

    workers, backend: where; None: as in the run, bounded by this machine (`replay.settings`). Raises `InputError` for
    a run or steps that cannot be done again, and `ReplayFailed` where ranks ended before they were through.
    """
    found = open_recorded(path)
    if found.folder is None or not found.folder.config.exists():
        raise InputError([Problem(str(path), "is a ledger alone; to do steps again takes the run's folder")])
    from andon.inspection.replay import RESULT, Replayed, read_range, replay, report_of, settings

    first, last = read_range(steps, found)
    config = settings(found.folder, workers, backend)
    if config.run.backend == "inline":
        with chosen(config.run):
            return report_of(replay(config, path, first, last), first, last)
    with chosen(config.run), tempfile.TemporaryDirectory(prefix="andon-replay-") as out:
        payload: dict[str, Any] = {"config": config.model_dump(mode="json"), "path": str(path.absolute()), "out": out}
        result = launch(
            ENTRY,
            payload | {"first": first, "last": last},
            workers=config.run.workers,
            run_folder=Path(out),
            timeout_s=config.run.grace_s,
        )
        if result.exit is Exit.USAGE and result.report is not None:
            raise InputError.of_text(result.report.message)
        if result.exit is not Exit.OK:
            raise ReplayFailed(result.cause, result.exit)
        said = json.loads((Path(out) / RESULT).read_bytes())
    fields = {name: (then, now) for name, (then, now) in (said["fields"] or {}).items()}
    return report_of(Replayed(**{**said, "fields": fields, "machine": tuple(said["machine"])}), first, last)
