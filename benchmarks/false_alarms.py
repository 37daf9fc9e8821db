"""False alarms: `python -m benchmarks.false_alarms` lets the suite judge right subjects, seed after seed.

Our trainer with 200 seeds on each CPU backend; a right loop written by hand and one with Accelerate with 100 each. Each
seed runs the trials that `andon falsify --budget quick --seed N` draws at one of four layouts: 2 and 3 ranks with
accumulation 1 and 2. All run in one process with the same ranks. The exit code is 1 if a claim was falsified, or if no
claim held for a subject. `--seeds 5` is a short run, and prints how long the whole one would take.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from andon_falsify.campaign.interpreter import Interpreter
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


@dataclass
class Tally:
    subject: str
    backend: str
    seeds: int
    trials: int = 0
    seconds: float = 0.0
    outcomes: Counter[Outcome] = field(default_factory=Counter)

    def told(self, trial: Trial, verdicts: Mapping[str, Verdict]) -> None:
        """Count the verdicts of one trial; print those that are not known or accuse the subject."""
        self.trials += 1
        for verdict in verdicts.values():
            self.outcomes[verdict.outcome] += 1
            if verdict.outcome in (Outcome.FALSIFIED, Outcome.UNKNOWN):
                print(f"{self.subject} {self.backend} seed {trial.seed}: {verdict}; case {trial.written()}", flush=True)

    @property
    def right(self) -> bool:
        return not self.outcomes[Outcome.FALSIFIED] and self.outcomes[Outcome.HOLDS] > 0


def request_of(subject: str, backend: str, seed: int) -> Request:
    """A request of `andon falsify` at one of four layouts. Calls, which no seed changes, are left to the first seed."""
    world, accumulation = (2, 3)[seed % 2], (1, 2)[seed // 2 % 2]
    request = understood(
        Options(subject=subject, backend=backend, seed=str(seed), world=str(world), accumulation=str(accumulation))
    )
    kinds = tuple(kind for kind in request.budget.kinds if kind != FUNCTIONS or seed == 0)
    return replace(request, budget=replace(request.budget, kinds=kinds))


def judged(subject: str, backends: Sequence[str], seeds: range, pools: RankPools) -> list[Tally]:
    """Every seed on every backend; the run on one rank that all backends are compared with is made once."""
    bench = open_bench(request_of(subject, backends[0], 0), pools)
    tallies = [Tally(subject, backend, len(seeds)) for backend in backends]
    for seed in seeds:
        for tally in tallies:
            began = time.monotonic()
            campaign = planned(request_of(subject, tally.backend, seed), bench)
            Interpreter(replace(campaign, exact=True), tally.told).run()  # exact: no case is shrunk
            tally.seconds += time.monotonic() - began
    return tallies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=max(SEEDS.values()), help="at most this many for each subject")
    options = parser.parse_args()
    tallies: list[Tally] = []
    with RankPools() as pools:
        for subject, most in SEEDS.items():
            backends = CPU_BACKENDS if subject == OURS else ("gloo",)
            tallies += judged(subject, backends, range(min(options.seeds, most)), pools)
    header = ("subject", "backend", "seeds", "trials", *(outcome.value for outcome in Outcome), "s per seed")
    rows = [
        [t.subject, t.backend, t.seeds, t.trials, *(t.outcomes[each] for each in Outcome), f"{t.seconds / t.seeds:.2f}"]
        for t in tallies
    ]
    print(table(header, rows))
    minutes = sum(t.seconds / t.seeds * SEEDS[t.subject] / 60 for t in tallies)
    print(f"at this pace all seeds of these subjects take {minutes:.0f} minutes")
    return 0 if tallies and all(tally.right for tally in tallies) else 1


if __name__ == "__main__":
    raise SystemExit(main())
