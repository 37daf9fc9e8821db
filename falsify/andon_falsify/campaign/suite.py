"""A campaign as tests of pytest: one for each claim at each place. Trials of a place are run once in a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from andon_falsify.campaign.interpreter import Bench, Campaign, Interpreter
from andon_falsify.campaign.opening import open_bench
from andon_falsify.campaign.reporting import report
from andon_falsify.campaign.request import Request
from andon_falsify.campaign.runner import origin_of, planned
from andon_falsify.ranks.pool import RankPools
from andon_falsify.verdict import Claim, Verdict, merge

Place = tuple[str, int, int]


@dataclass(frozen=True)
class ClaimAtPlace:
    """One test: a claim at a place."""

    place: Place
    claim: str

    def __str__(self) -> str:
        backend, world, accumulation = self.place
        return f"{backend or 'anywhere'} world {world} accumulation {accumulation}: {self.claim}"


class Suite:
    """The tests of a request, and their verdicts. Raises `InputError` for a request that its subject cannot answer.

    No rank is started before the first verdict is asked for; `close` ends them.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._pools = RankPools(deadline_s=request.budget.deadline_s)
        self._bench: Bench = open_bench(request, self._pools)
        self._campaign = planned(request, self._bench)
        self._held: dict[Place, dict[str, Verdict]] = {}

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Every claim there is of the subject."""
        return self._bench.claims

    @property
    def expected_failed(self) -> Mapping[str, str]:
        """Why claims may fall, by claim."""
        return self._request.expected_failed

    @property
    def runs(self) -> int:
        """How often the subject has been run in this process."""
        return self._bench.runs

    def tests(self) -> Iterator[ClaimAtPlace]:
        """Every selected claim at every place with a trial that judges it, place by place."""
        judged: dict[Place, set[str]] = {}
        for trial in self._campaign.trials:
            judged.setdefault(trial.place, set()).update(self._bench.kinds[trial.kind])
        for place, names in judged.items():
            for claim in self.claims:
                if claim.name in names & self._campaign.claims:
                    yield ClaimAtPlace(place, claim.name)

    def verdict(self, tried: ClaimAtPlace) -> Verdict:
        """What the trials of the place say of the claim, each counterexample with the command that repeats it."""
        if tried.place not in self._held:
            self._held[tried.place] = self._judged(tried.place)
        return self._held[tried.place][tried.claim]

    def close(self) -> None:
        """End the ranks."""
        self._pools.close()

    def _judged(self, place: Place) -> dict[str, Verdict]:
        campaign = self._at(place)
        said = Interpreter(campaign).run()
        found: dict[str, list[Verdict]] = {}
        for finding in report(self._bench, said, campaign.claims, origin_of(self._request)).findings:
            found.setdefault(finding.claim, []).append(finding.verdict)
        return {claim: merge(verdicts) for claim, verdicts in found.items()}

    def _at(self, place: Place) -> Campaign:
        """The trials of one place, with its share of the time; a smaller counterexample may lie at another."""
        trials = tuple(trial for trial in self._campaign.trials if trial.place == place)
        judged = frozenset().union(*(self._bench.kinds[trial.kind] for trial in trials))
        whole, places = self._campaign.budget, {trial.place for trial in self._campaign.trials}
        budget = replace(whole, shrink_s=whole.shrink_s / len(places))
        return replace(self._campaign, trials=trials, claims=self._campaign.claims & judged, budget=budget)
