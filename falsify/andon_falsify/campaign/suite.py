"""A campaign as tests of pytest, one for each claim and place. The trials of a place are run once per process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from andon_falsify.campaign.request import Request
from andon_falsify.campaign.run import Campaign, opened
from andon_falsify.verdict import Claim, Verdict, merge

Place = tuple[str, int, int]


@dataclass(frozen=True)
class ClaimAtPlace:
    """One test. place: backend, world size, accumulation."""

    place: Place
    claim: str

    def __str__(self) -> str:
        backend, world, accumulation = self.place
        return f"{backend} world {world} accumulation {accumulation}: {self.claim}"


class Suite:
    """The tests of a request, and their verdicts. Raises `InputError` for a request that its subject does not allow.

    No rank is started before the first verdict is requested; `close` ends them.
    """

    def __init__(self, request: Request) -> None:
        self._opened = ExitStack()
        self._campaign = self._opened.enter_context(opened(request))
        self._held: dict[Place, dict[str, Verdict]] = {}
        self.close = self._opened.close
        self.expected_failed: Mapping[str, str] = request.expected_failed
        self.claims: tuple[Claim, ...] = self._campaign.bench.claims

    @property
    def runs(self) -> int:
        """How often the subject has been run in this process."""
        return self._campaign.bench.runs

    def tests(self) -> Iterator[ClaimAtPlace]:
        """Every selected claim at every place with a trial that judges it, place by place."""
        for place in dict.fromkeys(trial.place for trial in self._campaign.trials):
            judged = self._at(place).claims
            yield from (ClaimAtPlace(place, claim.name) for claim in self.claims if claim.name in judged)

    def verdict(self, tried: ClaimAtPlace) -> Verdict:
        """The verdict of the trials of the place on the claim; each counterexample has the command that repeats it."""
        if tried.place not in self._held:
            campaign = self._at(tried.place)
            for _ in campaign.run():
                pass
            self._held[tried.place] = {cell.claim: merge(cell.findings) for cell in campaign.report().cells}
        return self._held[tried.place][tried.claim]

    def _at(self, place: Place) -> Campaign:
        """The trials of one place, with its share of the time; a smaller counterexample may lie at another."""
        whole = self._campaign
        trials = [trial for trial in whole.trials if trial.place == place]
        judged = frozenset().union(*(whole.bench.kinds[trial.kind] for trial in trials))
        share = whole.budget.shrink_s / len({trial.place for trial in whole.trials})
        budget = replace(whole.budget, shrink_s=share)
        return replace(whole, trials=trials, claims=whole.claims & judged, budget=budget)
