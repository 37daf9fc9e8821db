"""One digest on 1, 2, 3, 4 workers and three backends, and another for another seed: `python -m benchmarks.worlds`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.runs import run, table


def main() -> int:
    """Run the embedded job 12 times and once with another seed; 0 if there is exactly one result among the 12."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="1,2,3,4")
    parser.add_argument("--backends", default="inline,threads,gloo")
    parser.add_argument("--set", action="append", default=[], help="passed on to andon train")
    options = parser.parse_args()
    settings = [part for item in options.set for part in ("--set", item)]
    rows, results = [], set()
    with tempfile.TemporaryDirectory() as folder:
        for backend in options.backends.split(","):
            for world in options.worlds.split(","):
                found = run(Path(folder) / f"{backend}-{world}", "--backend", backend, "--workers", world, *settings)
                result = (found.summary["weights_digest"], found.summary["final_loss"]["hex"])
                results.add(result)
                rows.append((backend, world, *result, f"{found.seconds:.1f}"))
                print(rows[-1], flush=True)
        other = run(Path(folder) / "other", "--set", "seed=43", *settings)
        rows.append(
            (
                "gloo, seed 43",
                2,
                other.summary["weights_digest"],
                other.summary["final_loss"]["hex"],
                f"{other.seconds:.1f}",
            )
        )
    print(table(("backend", "workers", "weights", "final loss", "seconds"), rows))
    differs = (rows[-1][2], rows[-1][3]) not in results
    print(f"{len(results)} result(s) in {len(rows) - 1} runs; another seed gives another: {differs}")
    return 0 if len(results) == 1 and differs else 1


if __name__ == "__main__":
    raise SystemExit(main())
