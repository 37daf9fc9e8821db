"""A launcher as a process of its own, which a test can signal and kill: `python -m tests.launch.driver JSON`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

PRELOAD = ("torch", "torch.distributed", "andon.launch.rank", "tests.launch.entries")


def main() -> None:
    """Launch as the JSON argument says, print the result as one line, end with its exit code."""
    from andon.launch.launcher import launch, warm_up

    warm_up(PRELOAD)
    asked = json.loads(sys.argv[1])
    result = launch(
        asked["entry"],
        asked["payload"],
        workers=asked["workers"],
        run_folder=Path(asked["folder"]),
        timeout_s=asked["timeout_s"],
    )
    print("result " + json.dumps({"exit": result.exit.name, "cause": result.cause, "exits": dict(result.exits)}))
    sys.exit(result.exit)


if __name__ == "__main__":
    main()
