"""One digest on 1, 2, 3, 4 workers and three backends, and another for another seed: `python -m benchmarks.worlds`.

`--resumes 2:1,1:2` also ends runs half-way and resumes them on other numbers of workers; with `--signal SIGKILL` all
their processes are killed. The backend `default` leaves the choice to andon. On GPUs: `--backends nccl --worlds 1,2`.
Compared are the weights, the loss, and what comes out: the scores of every evaluation, the best step, and the files of
the model that the run leaves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from andon.console.messages import Exit
from andon_falsify.subjects.placing import why_not
from benchmarks.kill_resume import killed
from benchmarks.runs import Run, run, steps_of, table

SIGNALS = {"SIGTERM": ("launcher", Exit.PREEMPTED), "SIGKILL": ("group", -signal.SIGKILL)}
"""Which processes a signal goes to, and how the launcher then ends."""
DEFAULT = "default"


class Found(NamedTuple):
    backend: str
    workers: str
    weights: str
    loss: str
    outcome: str
    seconds: str


def found_by(backend: str, workers: str, ended: Run) -> Found:
    digest, loss = ended.summary["weights_digest"], ended.summary["final_loss"]["hex"]
    return Found(backend, workers, digest, loss, outcome(ended), f"{ended.seconds:.1f}")


def outcome(ended: Run) -> str:
    """A digest of every evaluation, the best step and the model's files. A step that is repeated counts once."""
    records = map(json.loads, (ended.folder / "ledger.jsonl").open(encoding="utf-8"))
    # Evaluations of a step that a kill undid come again, with other numbers of the chain of records.
    scores = {json.dumps([each["step"], each["rows"], each["scores"]]) for each in records if each["kind"] == "eval"}
    whole = hashlib.sha256(json.dumps([sorted(scores), ended.summary.get("best_step")]).encode())
    for file in sorted(ended.folder.glob("*/*.safetensors")):
        whole.update(file.name.encode() + file.read_bytes())
    return whole.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="1,2,3,4")
    parser.add_argument("--backends", default="inline,gloo")
    parser.add_argument("--resumes", default="", help="as 2:1,1:2: begun on 2 workers, ended, resumed on 1")
    parser.add_argument("--signal", choices=SIGNALS, default="SIGTERM", help="what ends a run half-way")
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
        words = _words(first.backend, first.workers)
        ended = run(Path(folder) / "other", *words, *settings, "--set", "seed=43")
        other = found_by(f"{first.backend}, seed 43", first.workers, ended)
    print(table(("backend", "workers", "weights", "final loss", "outcome", "seconds"), [*found, other]))
    results = {each[2:5] for each in found}
    differs = other[2:5] not in results
    print(f"{len(results)} result(s) in {len(found)} runs; another seed gives another: {differs}")
    return 0 if len(results) == 1 and differs else 1


def _all(base: Path, options: argparse.Namespace, settings: Sequence[str]) -> Iterator[Found]:
    for backend in options.backends.split(","):
        for workers in options.worlds.split(","):
            ended = run(base / f"{backend}-{workers}", *_words(backend, workers), *settings)
            yield found_by(backend, workers, ended)
        for pair in filter(None, options.resumes.split(",")):
            half = max(1, ended.summary["steps"] // 2)
            yield _resumed(base / f"{backend}-{pair.replace(':', '-')}", backend, pair, half, options.signal, settings)


def _resumed(folder: Path, backend: str, pair: str, half: int, sent: str, settings: Sequence[str]) -> Found:
    """A run on the first number of workers in `pair`, ended by a signal after step `half`, resumed on the second."""
    before, _, after = pair.partition(":")
    target, code = SIGNALS[sent]
    began = time.perf_counter()
    words = [*_words(backend, before), *settings]
    _, ended_with, said = killed(folder, words, half, target, 0, signal.Signals[sent])
    if ended_with != code:
        raise RuntimeError(f"{pair}: ended with {ended_with} after {steps_of(folder)} steps: {said}")
    at = steps_of(folder)
    ended = run(folder, *_words(backend, after), "--resume", "auto", *settings)
    ended = replace(ended, seconds=time.perf_counter() - began)
    return found_by(backend, f"{before}, from step {at} {after}", ended)


def _words(backend: str, workers: str) -> list[str]:
    return [*(["--backend", backend] if backend != DEFAULT else []), "--workers", workers]


if __name__ == "__main__":
    raise SystemExit(main())
