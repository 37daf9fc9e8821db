"""One digest on 1, 2, 3, 4 workers and three backends, and another for another seed: `python -m benchmarks.worlds`.

`--resumes 2:1,1:2` also ends runs half-way and resumes them on other numbers of workers. On GPUs: `--backends nccl
--worlds 1,2`.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from andon.console.exits import Exit
from andon_falsify.subjects.placing import why_not
from benchmarks.runs import Run, command, environment, run, steps_of, table


class Found(NamedTuple):
    backend: str
    workers: str
    weights: str
    loss: str
    seconds: str


def found_by(backend: str, workers: str, ended: Run) -> Found:
    digest, loss = ended.summary["weights_digest"], ended.summary["final_loss"]["hex"]
    return Found(backend, workers, digest, loss, f"{ended.seconds:.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="1,2,3,4")
    parser.add_argument("--backends", default="inline,threads,gloo")
    parser.add_argument("--resumes", default="", help="as 2:1,1:2: begun on 2 workers, ended, resumed on 1")
    parser.add_argument("--set", action="append", default=[], help="passed on to andon train")
    options = parser.parse_args()
    for backend, workers in product(options.backends.split(","), options.worlds.split(",")):
        if reason := why_not(backend, int(workers)):
            parser.error(reason)  # the run would go on on CPUs
    settings = [part for item in options.set for part in ("--set", item)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for each in _all(Path(folder), options, settings):
            found.append(each)
            print(*each, flush=True)
        first = found[0]
        words = ("--backend", first.backend, "--workers", first.workers)
        ended = run(Path(folder) / "other", *words, "--set", "seed=43", *settings)
        other = found_by(f"{first.backend}, seed 43", first.workers, ended)
    print(table(("backend", "workers", "weights", "final loss", "seconds"), [*found, other]))
    results = {(each.weights, each.loss) for each in found}
    differs = (other.weights, other.loss) not in results
    print(f"{len(results)} result(s) in {len(found)} runs; another seed gives another: {differs}")
    return 0 if len(results) == 1 and differs else 1


def _all(base: Path, options: argparse.Namespace, settings: Sequence[str]) -> Iterator[Found]:
    for backend in options.backends.split(","):
        for workers in options.worlds.split(","):
            ended = run(base / f"{backend}-{workers}", "--backend", backend, "--workers", workers, *settings)
            yield found_by(backend, workers, ended)
        for pair in filter(None, options.resumes.split(",")):
            yield _resumed(base / f"{backend}-{pair.replace(':', '-')}", backend, pair, settings)


def _resumed(folder: Path, backend: str, pair: str, settings: Sequence[str]) -> Found:
    """Begun on as many workers as `pair` says first, ended by SIGTERM half-way, resumed on the others.

    Raises `RuntimeError` if the run did not end at a step boundary before its end.
    """
    before, _, after = pair.partition(":")
    began = time.perf_counter()
    line = command(folder, "--backend", backend, "--workers", before, *settings)
    launcher = subprocess.Popen(line, env=environment(), stdout=subprocess.DEVNULL)
    while launcher.poll() is None and steps_of(folder) < _half(folder):
        time.sleep(0.01)
    launcher.send_signal(signal.SIGTERM)
    if launcher.wait() != Exit.PREEMPTED:
        raise RuntimeError(f"{pair}: ended with {launcher.returncode} after {steps_of(folder)} steps")
    at = steps_of(folder)
    ended = run(folder, "--backend", backend, "--workers", after, "--resume", "auto", *settings)
    ended = replace(ended, seconds=time.perf_counter() - began)
    return found_by(backend, f"{before}, from step {at} {after}", ended)


def _half(folder: Path) -> int:
    """Half of the steps that the run plans; 1 before its ledger says how many."""
    try:
        with (folder / "ledger.jsonl").open() as lines:
            return max(1, int(json.loads(next(lines))["plan"]["steps"]) // 2)
    except (FileNotFoundError, StopIteration, json.JSONDecodeError):
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
