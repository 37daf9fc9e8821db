"""`andon train` as a process of its own with another entry for its ranks: `python -m tests.training.driver JSON`."""

from __future__ import annotations

import json
import sys

from andon.cli.app import guarded
from andon.cli.train import run_training


def main() -> None:
    """Train as the JSON argument says; ends as the command does."""
    asked = json.loads(sys.argv[1])
    entry = f"tests.training.entries:{asked['entry']}"
    sys.exit(guarded(lambda: run_training(None, asked["overrides"], asked["flags"], entry=entry)))


if __name__ == "__main__":
    main()
