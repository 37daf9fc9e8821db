"""What a rank process is started with: a configuration and a run folder, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENTRY = "andon.training.entry:train_rank"


def payload_of(config: Any, folder: Path) -> dict[str, Any]:
    """The payload of `train_rank`: a `Config` and the run folder."""
    return {"config": config.model_dump(mode="json"), "folder": str(folder)}


def train_rank(payload: Mapping[str, Any]) -> int:
    """Be one rank of a run; returns an `Exit`. Called by the launcher in each of its processes."""
    from andon.config.schema import Config
    from andon.launch.rank import preempted
    from andon.run.folder import RunFolder
    from andon.training.session import train

    config = Config.model_validate(payload["config"])
    return int(train(config, RunFolder(Path(payload["folder"])), lambda: preempted() is not None))
