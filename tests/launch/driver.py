"""A launcher as a process of its own, which a test can signal and kill: `python -m tests.launch.driver JSON`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

PRELOAD = ("torch", "torch.distributed", "andon.launch.rank", "tests.launch.entries")


def main() -> None:
    """Launch as the JSON argument says, print the result as one line, end with its exit code."""
    from andon.launch.elastic import launch_elastic
    from andon.launch.launcher import launch, warm_up
    from andon.launch.sizes import Bounds, Sizing

    asked = json.loads(sys.argv[1])
    warm_up(asked.get("preload", PRELOAD))
    entry, payload, workers = asked["entry"], asked["payload"], asked["workers"]
    folder, bound = Path(asked["folder"]), asked["timeout_s"]
    if "least" in asked:
        sizing = Sizing(Bounds(asked["least"], workers))
        result = launch_elastic(entry, lambda world, again: payload, sizing, run_folder=folder, timeout_s=bound)
    else:
        result = launch(entry, payload, workers=workers, run_folder=folder, timeout_s=bound)
    print("result " + json.dumps({"exit": result.exit.name, "cause": result.cause, "exits": dict(result.exits)}))
    sys.exit(result.exit)


if __name__ == "__main__":
    main()
