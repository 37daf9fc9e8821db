"""`andon train` as a process of its own, whose ranks wait at a step: `python -m tests.launch.training JSON`."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from andon.cli.app import guarded
from andon.launch.sizes import Bounds, Sizing

AT = 7
"""The update after which rank 0 waits."""


def hold(payload: Mapping[str, Any]) -> int:
    """Train; rank 0 waits in update 7 for the file `go` beside the run folder, and makes `held` there meanwhile."""
    from andon.launch.context import RankContext
    from andon.step.replica import Replica
    from andon.training.entry import train_rank

    beside, update, pause = Path(payload["folder"]).parent, Replica.apply, threading.Event()

    def apply(replica: Replica) -> None:
        update(replica)
        if RankContext.from_environment().rank == 0 and replica.updates == AT:
            (beside / "held").touch()
            while not (beside / "go").exists():
                pause.wait(0.02)

    Replica.apply = apply  # type: ignore[method-assign, assignment]
    return train_rank(payload)


def main() -> None:
    from andon.cli.train import run_training

    asked = json.loads(sys.argv[1])
    sizing = Sizing(Bounds(1, 2))
    entry = "tests.launch.training:hold"
    sys.exit(guarded(lambda: run_training(None, asked["overrides"], asked["flags"], sizing=sizing, entry=entry)))


if __name__ == "__main__":
    main()
