"""What a rank process is started with: a configuration and a run folder, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from andon.config.schema import Config
from andon.launch.rank import preempted
from andon.run.folder import RunFolder
from andon.training.rows import found_task, tell_found_task

ENTRY = "andon.training.entry:train_rank"


def payload_of(config: Config, folder: Path, started: float) -> dict[str, Any]:
    """The payload of `train_rank`: what to train, where, and when the command began (`time.monotonic`).

    Settings that nobody set are left out: every rank chooses the same for them from the data and the base.
    """
    values = config.model_dump(mode="json", exclude_unset=True)
    return {"config": values, "folder": str(folder), "started": started, "task": found_task(config)}


def train_rank(payload: Mapping[str, Any]) -> int:
    """Be one rank of a run; returns an `Exit`. Called by the launcher in each of its processes."""
    from andon.training.run import train

    config = Config.model_validate(payload["config"])
    folder = RunFolder(Path(payload["folder"]))
    tell_found_task(config, tuple(payload["task"]))
    return int(train(config, folder, lambda: preempted() is not None, payload["started"]))
