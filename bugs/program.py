"""One run of a case as a command, for `andon falsify --script`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bugs.bench import Job, run_case
from bugs.cases import CASES


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=sorted(CASES))
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resumed", action="store_true")
    parser.add_argument("--right", action="store_true")
    parser.add_argument("--tool", default="script")
    options = parser.parse_args()
    layout = {"world": options.world, "batch": options.batch, "accumulate": options.accumulate}
    folder: Path = options.folder.resolve()
    resumed = options.resumed and (folder / "checkpoint.pt").exists()  # a run may be killed before its first checkpoint
    job = Job(options.right, options.tool, folder, resumed=int(resumed), **layout)
    outcome = run_case(CASES[options.name], job)
    print(outcome.error or outcome.value, file=sys.stderr if outcome.error else sys.stdout)
    return 1 if outcome.error else 0


if __name__ == "__main__":
    sys.exit(main())
