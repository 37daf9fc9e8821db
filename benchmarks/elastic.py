"""One run that goes 4 -> 2 -> 3 workers, by killing and adding agents: `python -m benchmarks.elastic`.

A run of `--workers 2:4` starts with 4. Two of its agents are killed by SIGKILL, one after the other; then one of its
workers, which is started again at the same size; then a third worker is asked for (`andon resize RUN 3`). Each event
comes a few steps after the last, drawn from the seed. What is left is compared with a run that nobody touched: final
weights and loss to the bit, and `andon verify` on both ledgers (every row exactly once per epoch is one of its claims).
Last, a run at its minimum loses an agent, and must end with 71.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runs import command, environment, run, steps_of, table
from falsify.nemesis.processes import family, wait_until_gone

_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Elastic:
    """A run with `--workers MIN:MAX` that is under way."""

    folder: Path
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, folder: Path, workers: str, settings: Sequence[str]) -> Elastic:
        """Start it; what it says is kept."""
        started = subprocess.Popen(
            command(folder, "--workers", workers, *settings),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return cls(folder, started)

    def seen(self) -> dict[str, Any]:
        """Who trains now: the launcher's own account; empty where there is none yet."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "reports" / "agents.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def steps_in(self, generation: int, steps: int) -> dict[str, Any]:
        """Wait until this generation of workers has done so many steps; who trains then.

        Raises `RuntimeError` where the run ends first, or does not come to it in two minutes.
        """
        deadline, before = time.monotonic() + _PATIENCE_S, steps_of(self.folder)
        while self.process.poll() is None and time.monotonic() < deadline:
            found = self.seen()
            if found.get("generation", 0) < generation:
                before = steps_of(self.folder)
            elif steps_of(self.folder) >= before + steps:
                return found
            time.sleep(0.005)
        raise RuntimeError(f"generation {generation} did not come to {steps} steps; exit {self.process.poll()}")

    def ended(self) -> tuple[int, list[str]]:
        """Wait for its end, and for that of every process of it: the exit code, and what it said."""
        members = family(self.process.pid)
        said = self.process.communicate()[1]
        wait_until_gone(members)
        return self.process.returncode, said.strip().splitlines()


def worlds(folder: Path) -> list[int]:
    """The number of workers of each generation, from the ledger."""
    whole = (folder / "ledger.jsonl").read_bytes().rpartition(b"\n")[0]
    lines = [json.loads(line) for line in whole.splitlines()]
    return [line["world"] for line in lines if line["kind"] in ("start", "resume")]


def resize(folder: Path, workers: int) -> None:
    """Ask for another number of workers, as a user would."""
    subprocess.run([sys.executable, "-m", "andon", "resize", str(folder), str(workers)], check=True, env=environment())


def main() -> int:
    """Print what happened and what was left; 0 if all of it is as promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=["training.checkpoint_every=7"])
    options = parser.parse_args()
    settings = [part for item in options.set for part in ("--set", item)]
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as base:
        good = _four_two_three(Path(base), settings, draw)
        good &= _below_the_minimum(Path(base) / "least", settings)
    return 0 if good else 1


def _four_two_three(base: Path, settings: Sequence[str], draw: random.Random) -> bool:
    whole = run(base / "whole", "--workers", "4", *settings)
    elastic = Elastic.start(base / "elastic", "2:4", settings)
    rows = []
    for generation, what in enumerate(("agent", "agent", "worker", "resize"), start=1):
        steps = draw.randrange(3, 20)
        found = elastic.steps_in(generation, steps)
        rows.append((generation, len(found["agents"]), steps, what))
        if what == "resize":
            resize(elastic.folder, 3)
        else:
            os.kill(draw.choice(found["agents"])[what], signal.SIGKILL)
    code, said = elastic.ended()
    print(table(("generation", "workers", "steps of it", "then killed or asked"), rows))
    print("\n".join(line for line in said if "elastic:" in line))
    sizes = worlds(elastic.folder)
    same = code == 0 and result_of(elastic.folder) == result_of(whole.folder)
    good = verified(whole.folder, elastic.folder)
    print(f"workers by generation: {sizes}; exit {code}; bits {'same' if same else 'OTHER'}")
    return same and good and sizes == [4, 3, 2, 2, 3]


def verified(*runs: Path) -> bool:
    """Whether `andon verify` finds every claim of these runs' ledgers to hold; prints those that it checked."""
    done = subprocess.run(
        [sys.executable, "-m", "andon", "verify", *map(str, runs)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    print("\n".join(line for line in done.stdout.splitlines() if "not applicable (" not in line))
    return done.returncode == 0


def result_of(folder: Path) -> tuple[str, str]:
    """Digest of the final weights, and the final loss as hexadecimal."""
    found = json.loads((folder / "summary.json").read_text())
    return found["weights_digest"], found["final_loss"]["hex"]


def _below_the_minimum(folder: Path, settings: Sequence[str]) -> bool:
    elastic = Elastic.start(folder, "2:2", settings)
    os.kill(elastic.steps_in(1, 2)["agents"][1]["agent"], signal.SIGKILL)
    code, said = elastic.ended()
    print(f"an agent lost at the minimum: exit {code}; {said[-1]}")
    return code == 71


if __name__ == "__main__":
    raise SystemExit(main())
