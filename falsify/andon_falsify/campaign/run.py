"""Runs a campaign: plans its trials, runs them one after the other, and searches for smaller counterexamples."""

from __future__ import annotations

import datetime
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from andon.console.messages import InputError, Problem
from andon_contracts.fingerprint import environment
from andon_contracts.legible import counted
from andon_falsify.campaign.findings import TrialVerdict, factors_of, findings, mistake
from andon_falsify.campaign.request import OURS, Request, check_names
from andon_falsify.campaign.shrink import shrink
from andon_falsify.campaign.trial import Budget, Layouts, Trial, draw, read_trial
from andon_falsify.peers.registry import PEERS, installed
from andon_falsify.report.findings import Column, Expected, Report
from andon_falsify.verdict import Outcome, Verdict, unknown

if TYPE_CHECKING:
    from andon_falsify.campaign.bench import Bench

_FAILURES = 4
"""After this many identical failures, and no trial that worked, places that failed are not tried again."""


@dataclass
class Campaign:
    """A campaign, and what its trials have said so far (`said`).

    claims: the names of the selected ones. exact: the trials are not shrunk. worlds, accumulations: those that a
    smaller counterexample may have; empty for any smaller one. limit: sets the deadline of the runs that follow. about:
    a report without findings.
    """

    bench: Bench
    trials: Sequence[Trial]
    claims: frozenset[str]
    budget: Budget
    worlds: tuple[int, ...] = ()
    accumulations: tuple[int, ...] = ()
    exact: bool = False
    limit: Callable[[float], None] = lambda seconds: None
    about: Report = field(default_factory=lambda: Report(""))
    said: list[TrialVerdict] = field(default_factory=list, init=False)
    _known: dict[Trial, dict[str, Verdict]] = field(default_factory=dict, init=False)
    _late: dict[tuple[str, int], int] = field(default_factory=dict, init=False)
    _failures: list[str] = field(default_factory=list, init=False)
    _failed: set[tuple[str, int, int]] = field(default_factory=set, init=False)
    _worked: bool = field(default=False, init=False)

    @property
    def opening_line(self) -> str:
        """`andon 0.1.0 on inline, gloo; budget quick, seed 7: 36 trials, 20 of 21 claims`."""
        bench, trials = self.bench, self.trials
        backends = ", ".join(dict.fromkeys(trial.place[0] for trial in trials)) or "no backend"
        seeds = sorted({trial.seed for trial in trials})
        shown = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}" if seeds else "no seed"
        name = f"{Column(bench.subject, '').short} {bench.version}".strip()
        how = "exactly one case" if self.exact else f"budget {self.budget.name}"
        claims = f"{len(self.claims)} of {len(bench.claims)} claims"
        return f"{name} on {backends}; {how}, {shown}: {counted(len(trials), 'trial')}, {claims}"

    def run(self) -> Iterator[tuple[Trial, Mapping[str, Verdict]]]:
        """Run every trial, and yield it with its verdicts; then search for smaller counterexamples."""
        for trial in self.trials:
            found = self._tried(trial)
            self.said += [TrialVerdict(trial, verdict) for verdict in found.values()]
            yield trial, found
        if not self.exact and self.budget.shrink_s:
            self.said += self._smallest()

    def report(self, unfinished: str = "", *, explained: bool = True) -> Report:
        """The results so far. A selected claim that no trial has judged is unknown; the others are listed by name.

        explained: explain ratios, which takes a while.
        """
        said: dict[str, list[TrialVerdict]] = {claim.name: [] for claim in self.bench.claims}
        for each in self.said:
            said[each.verdict.claim].append(each)
        selected = [claim for claim in self.bench.claims if claim.name in self.claims]
        found = [findings(self.bench, claim, said[claim.name], explained=explained) for claim in selected]
        return replace(
            self.about,
            findings=tuple(chain.from_iterable(found)),
            runs=self.bench.runs,
            not_selected=tuple(name for name in said if name not in self.claims),
            statements={claim.name: claim.statement for claim in self.bench.claims},
            unfinished=unfinished,
        )

    def _tried(self, trial: Trial) -> Mapping[str, Verdict]:
        names = self.bench.kinds[trial.kind] & self.claims
        if why := self._give_up_reason(trial):
            return {claim.name: unknown(claim, why) for claim in self.bench.claims if claim.name in names}
        began = time.monotonic()
        found = self._judged(trial, names, self.budget.deadline_s)
        if {verdict.outcome for verdict in found.values()} == {Outcome.UNKNOWN}:
            if time.monotonic() - began >= self.bench.late_after * self.budget.deadline_s:
                place = (trial.case.backend, max(_worlds(trial)))
                self._late[place] = self._late.get(place, 0) + 1
            self._failures.append(next(iter(found.values())).reasons[0])
            self._failed.add(trial.place)
        else:
            self._worked = True
        return found

    def _give_up_reason(self, trial: Trial) -> str:
        """Why a trial is not worth its time: runs of its size missed the deadline too often, or nothing ever works.

        A place that has not failed yet is tried at least once: failures at other places prove nothing about it.
        """
        for world in _worlds(trial):
            if self._late.get((trial.case.backend, world), 0) >= self.budget.most_late:
                late = f"{self.budget.most_late} runs on {world} ranks did not end"
                return f"not tried: {late} within {max(1.0, self.bench.late_after) * self.budget.deadline_s:.0f} s"
        if not self._worked and trial.place in self._failed and self._failures.count(self._failures[-1]) >= _FAILURES:
            return self._failures[-1]
        return ""

    def _judged(self, trial: Trial, claims: frozenset[str], deadline_s: float) -> Mapping[str, Verdict]:
        known = self._known.setdefault(trial, {})
        if not claims <= known.keys():
            self.limit(deadline_s)
            known |= self.bench.attempt(trial, claims)
        return {name: verdict for name, verdict in known.items() if name in claims}

    def _smallest(self) -> Iterator[TrialVerdict]:
        end = time.monotonic() + self.budget.shrink_s
        fallen: dict[str, list[TrialVerdict]] = {}
        for said in self.said:
            if said.verdict.outcome is Outcome.FALSIFIED:
                fallen.setdefault(said.verdict.claim, []).append(said)
        for place, (claim, found) in enumerate(fallen.items()):
            now = time.monotonic()
            # Most factors in the ratio first; of these, fewest ranks.
            cases = [(each, each.verdict.counterexamples[0], each.trial.case) for each in found]
            first, *_ = max(cases, key=lambda each: (len(factors_of(*each[1:])), -each[2].world))
            trial = self._shrunk(first, now + (end - now) / (len(fallen) - place))
            yield TrialVerdict(trial, self._known[trial][claim], shrunk=True)

    def _shrunk(self, first: TrialVerdict, end: float) -> Trial:
        claim, why = first.verdict.claim, mistake(first.verdict.counterexamples[0], first.trial.case)
        draws = any("random" in each.runs for each in self.bench.claims if each.name == claim)

        def falls(smaller: Trial) -> bool:
            if self._give_up_reason(smaller) or (draws and smaller.case.dropout != first.trial.case.dropout):
                return False
            left = min(self.budget.deadline_s, end - time.monotonic())
            found = self._judged(smaller, frozenset({claim}), left)[claim].counterexamples
            return bool(found) and mistake(found[0], smaller.case) == why

        return shrink(first.trial, falls, end - time.monotonic(), self.worlds, self.accumulations)


def _worlds(trial: Trial) -> tuple[int, ...]:
    return (trial.case.world, trial.then_world) if trial.then_world else (trial.case.world,)


def run_campaign(request: Request) -> Report:
    """The report of the whole campaign. Raises `InputError` for names that the subject does not know."""
    with opened(request) as campaign:
        for _ in campaign.run():
            pass
        return campaign.report()


@contextmanager
def opened(request: Request) -> Iterator[Campaign]:
    """The campaign that `request` asks for; its processes end with the context.

    Raises `InputError` for a package that is missing and for names that the subject does not know.
    """
    if request.script is not None:
        from andon_falsify.campaign.script_bench import ScriptBench

        # Each run of a script starts torch anew, and only its layout could be made smaller.
        bench = ScriptBench(request.script, request.budget.deadline_s)
        yield plan(replace(request, budget=replace(request.budget, shrink_s=0.0)), bench)
        return
    from andon_falsify.ranks.pool import RankPools

    with RankPools(deadline_s=request.budget.deadline_s) as pools:
        if request.subject == OURS:
            from andon_falsify.campaign.warm_bench import AndonBench
            from andon_falsify.ranks.trainer import AndonTrainer

            yield plan(request, AndonBench(AndonTrainer(pools)), pools.limit)
            return
        from andon_falsify.campaign.warm_bench import LoopBench
        from andon_falsify.loops.subject import LoopSubject

        name, peer = request.subject, PEERS.get(request.subject)
        # As `python -m` does: `mytrainer:make` is a file in the current folder. Ranks inherit the path. The subject's
        # own code is imported by ranks alone, since it may end the process.
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, folder)
        package = name.partition(":")[0].partition(".")[0]
        if peer is None and package not in sys.modules and find_spec(package) is None:
            msg = f"there is no module {package!r}, in the current folder or installed; check the name"
            raise InputError([Problem("--subject", msg)])
        module, _, made = name.partition(":")
        source = Path(*module.split(".")).with_suffix(".py")
        words = {*re.findall(r"import \*|\w+", source.read_text(errors="replace"))} if source.is_file() else {made}
        if peer is None and words.isdisjoint((made, "import *", "__getattr__", "globals", "exec", "setattr")):
            raise InputError([Problem("--subject", f"{source} defines no {made!r}; check the name")])
        names = packages_distributions().get(package, [])
        version = peer.version if peer is not None else installed(names[0]) if names else ""
        make = name if peer is None else peer.make
        yield plan(request, LoopBench(LoopSubject(make, name, pools), name, version), pools.limit)


def plan(request: Request, bench: Bench, limit: Callable[[float], None] = lambda seconds: None) -> Campaign:
    """The trials that `request` asks for, and the claims that they judge.

    Raises `InputError` for claims and backends that `bench` does not know, and for a malformed case.
    """
    if request.name:
        bench.subject, bench.words = request.name, (*bench.words, "--name", request.name)
    names = tuple(claim.name for claim in bench.claims)
    wrong = check_names("--claim", request.claims, names, "claim")
    wrong += check_names("--expected-failed", tuple(request.expected_failed), names, "claim")
    wrong += check_names("--backend", request.backends, bench.every_backend, "backend")
    if wrong:
        raise InputError(wrong)
    if request.case is None:
        trials = _drawn(request, bench)
    else:
        (backend,), (world,), (accumulation,) = request.backends, request.worlds, request.accumulations
        place = {"world": world, "accumulation": accumulation, "seed": request.seeds[0]}
        try:
            trials = [read_trial(request.case, backend=backend, **place)]
        except ValueError as error:
            raise InputError([Problem("--case", str(error))]) from None
    judged = {trial: bench.kinds.get(trial.kind, frozenset()) for trial in trials}
    claims = frozenset(request.claims) or frozenset().union(*judged.values())
    trials = [trial for trial in trials if judged[trial] & claims]
    about = _about(request, bench, trials)
    layouts = {"worlds": request.worlds, "accumulations": request.accumulations}
    exact = request.case is not None
    return Campaign(bench, trials, claims, request.budget, **layouts, exact=exact, limit=limit, about=about)


def _drawn(request: Request, bench: Bench) -> list[Trial]:
    """The same trials in the same order, whatever the order of the options: no verdict may depend on that."""
    budget = request.budget
    layouts = Layouts(
        tuple(sorted(request.backends or bench.backends, key=bench.every_backend.index)),
        tuple(sorted(request.worlds or budget.worlds)),
        tuple(sorted(request.accumulations or budget.accumulations)),
    )
    if request.claims:  # a claim that is requested by name is tried even if the budget leaves out its kind of trial
        asked = tuple(kind for kind, judged in bench.kinds.items() if judged & set(request.claims))
        budget = replace(budget, kinds=asked)
    found = [trial for seed in request.seeds for trial in draw(seed, budget, layouts, tuple(bench.kinds))]
    return list(dict.fromkeys(map(bench.suited, found)))


def _about(request: Request, bench: Bench, trials: Sequence[Trial]) -> Report:
    peer = PEERS.get(request.subject) if request.script is None else None
    known = peer.expected if peer is not None and peer.as_measured else {}
    expected = [Expected(bench.subject, *each) for each in known.items() if each[0] not in request.expected_failed]
    expected += [Expected(bench.subject, claim, reason, True) for claim, reason in request.expected_failed.items()]
    lacking = {name: [each.lacking for each in trials if each.place[0] == name] for name in request.backends}
    libraries = dict.fromkeys(("andon", "torch", "transformers", "peft", *(peer.measured if peer is not None else ())))
    untried = {backend: why[0] for backend, why in lacking.items() if why and all(why)}
    return replace(here(libraries), expected=tuple(expected), untried=untried)


def here(libraries: Iterable[str]) -> Report:
    """A report without findings: the time, the machine, and the versions of `libraries`."""
    import torch

    versions = {"python": platform.python_version(), **{name: installed(name) for name in libraries}}
    system = f"{platform.system()} {platform.machine()}"
    machine = {"cpu": str(environment()["cpu"]), "os": system, "torch": torch.__version__}  # what bits depend on
    if torch.cuda.device_count():
        machine["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Report(started, versions={name: number for name, number in versions.items() if number}, machine=machine)
