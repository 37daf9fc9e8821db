"""False alarms: `python -m benchmarks.false_alarms` lets the suite judge what is right, seed after seed.

Our trainer with 200 seeds on each CPU backend, a right loop written by hand and a right one with Accelerate with 100
each: the trials that `andon falsify --budget quick --seed N` draws at one place, which goes from seed to seed through 2
and 3 ranks with accumulation 1 and 2. All in one process, whose ranks are kept. Printed are a table and one line of
JSON; the exit code is 1 where a claim was falsified, or a subject was held to nothing. `--seeds 5` is a short run, and
says how long the whole one would take.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from andon_falsify.campaign.interpreter import Bench, Interpreter
from andon_falsify.campaign.opening import open_bench
from andon_falsify.campaign.request import OURS, Options, Request, understood
from andon_falsify.campaign.runner import planned
from andon_falsify.campaign.trial import FUNCTIONS, Trial
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.placing import CPU_BACKENDS
from andon_falsify.verdict import Outcome, Verdict
from benchmarks.runs import table

SEEDS: Mapping[str, int] = {OURS: 200, "plain": 100, "accelerate_right": 100}
"""The right subjects, each with its number of seeds."""
_WORLDS, _ACCUMULATIONS = (2, 3), (1, 2)


@dataclass
class Tally:
    """The outcomes of a subject on a backend in so many `seeds`; `said` by outcome, `alarms` those that accuse it."""

    subject: str
    backend: str
    seeds: int = 0
    trials: int = 0
    seconds: float = 0.0
    said: Counter[Outcome] = field(default_factory=Counter)
    alarms: list[str] = field(default_factory=list)

    def told(self, trial: Trial, verdicts: Mapping[str, Verdict]) -> None:
        self.trials += 1
        for verdict in verdicts.values():
            self.said[verdict.outcome] += 1
            if verdict.outcome in (Outcome.FALSIFIED, Outcome.UNKNOWN):
                print(f"{self.subject} {self.backend} seed {trial.seed}: {verdict}; case {trial.written()}", flush=True)
            if verdict.outcome is Outcome.FALSIFIED:
                self.alarms.append(f"seed {trial.seed}: {verdict}")

    @property
    def right(self) -> bool:
        return not self.alarms and self.said[Outcome.HOLDS] > 0


def place(seed: int) -> tuple[int, int]:
    """World size and accumulation that a seed is tried with: all four in turn."""
    return _WORLDS[seed % 2], _ACCUMULATIONS[seed // 2 % 2]


def request_of(subject: str, backend: str, seed: int) -> Request:
    world, accumulation = place(seed)
    options = Options(
        subject=subject, backend=backend, seed=str(seed), world=str(world), accumulation=f"{accumulation}"
    )
    request = understood(options)
    kinds = tuple(kind for kind in request.budget.kinds if kind != FUNCTIONS or seed == 0)
    return replace(request, budget=replace(request.budget, kinds=kinds))


def judge_seed(bench: Bench, tally: Tally, seed: int) -> None:
    began = time.monotonic()
    campaign = planned(request_of(tally.subject, tally.backend, seed), bench)
    Interpreter(replace(campaign, exact=True), tally.told).run()
    tally.seconds += time.monotonic() - began


def judged(subject: str, backends: Sequence[str], seeds: range, pools: RankPools) -> list[Tally]:
    bench = open_bench(request_of(subject, backends[0], 0), pools)
    tallies = [Tally(subject, backend, len(seeds)) for backend in backends]
    for seed in seeds:
        for tally in tallies:
            judge_seed(bench, tally, seed)
    print(f"{subject}: seeds {seeds.start} to {seeds.stop - 1}, {bench.runs} runs", flush=True)
    return tallies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", action="append", choices=list(SEEDS), help="again for another; else all")
    parser.add_argument("--backend", action="append", choices=CPU_BACKENDS, help="of our trainer; else all")
    parser.add_argument("--seeds", type=int, default=max(SEEDS.values()), help="at most so many of each")
    parser.add_argument(
        "--first", type=int, default=0, help="the seed to begin with, where several processes share them"
    )
    parser.add_argument("--json", type=Path, help="where the JSON goes too")
    options = parser.parse_args()
    if options.seeds < 1 or options.first < 0:
        parser.error("--seeds must be at least 1, --first at least 0")
    tallies: list[Tally] = []
    with RankPools() as pools:
        for subject in options.subject or SEEDS:
            backends = tuple(options.backend or CPU_BACKENDS) if subject == OURS else ("gloo",)
            seeds = range(options.first, min(options.first + options.seeds, SEEDS[subject]))
            if seeds:
                tallies += judged(subject, backends, seeds, pools)
    report(tallies, options.json)
    return 0 if tallies and all(tally.right for tally in tallies) else 1


def report(tallies: Sequence[Tally], file: Path | None) -> None:
    header = ("subject", "backend", "seeds", "trials", *(outcome.value for outcome in Outcome), "s per seed")
    rows = []
    minutes = 0.0
    for tally in tallies:
        each = tally.seconds / tally.seeds
        minutes += each * SEEDS[tally.subject] / 60
        counts = [tally.said[outcome] for outcome in Outcome]
        rows.append([tally.subject, tally.backend, tally.seeds, tally.trials, *counts, round(each, 2)])
    print(table(header, rows))
    print(f"at this pace all seeds of these subjects take {minutes:.0f} minutes")
    text = json.dumps(
        [dict(zip(header, row, strict=True)) | {"alarms": t.alarms} for row, t in zip(rows, tallies, strict=True)]
    )
    print(text)
    if file is not None:
        file.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
