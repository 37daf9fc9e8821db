"""One campaign from a request to its report."""

from __future__ import annotations

import datetime
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from andon.console.messages import InputError, Problem
from andon_falsify.campaign.findings import Report
from andon_falsify.campaign.generator import Layout, draw
from andon_falsify.campaign.interpreter import Bench, Campaign, Interpreter, Told
from andon_falsify.campaign.opening import open_bench
from andon_falsify.campaign.reporting import Origin, report
from andon_falsify.campaign.request import Request, check_names
from andon_falsify.campaign.trial import Trial, read_trial
from andon_falsify.peers.registry import PEERS, installed
from andon_falsify.ranks.pool import RankPools
from andon_falsify.verdict import Verdict

_EACH = 20
"""Where there are many trials, a report is made when another 1 / _EACH of those so far are over."""
Began = Callable[[Bench, Campaign], None]
"""Is told what is about to be run."""


@dataclass(frozen=True)
class Listeners:
    """Who is told of what goes on: when a campaign begins, of every trial, and of what is known. See `carried_out`."""

    began: Began = lambda bench, campaign: None
    told: Told = lambda trial, verdicts: None
    known: Callable[[Report], None] | None = None


class CutShortError(Exception):
    """A campaign that did not come to its end. report: what was known by then; the cause is chained."""

    def __init__(self, known: Report) -> None:
        super().__init__("the campaign was cut short")
        self.report = known


def run_campaign(request: Request, listeners: Listeners | None = None) -> Report:
    """Do what `request` asks for; every process that was started has ended afterwards.

    Raises `InputError` for names that the subject does not know, and `CutShortError` where something that is no
    finding ended it.
    """
    listeners = listeners or Listeners()
    with RankPools(deadline_s=request.budget.deadline_s) as pools:
        bench = open_bench(request, pools)
        campaign = planned(request, bench)
        origin = origin_of(request)
        listeners.began(bench, campaign)
        found = carried_out(campaign, origin, listeners)
        return replace(found, untried=_untried(request.backends, campaign.trials))


def carried_out(campaign: Campaign, origin: Origin, listeners: Listeners) -> Report:
    """Run `campaign` to its end; `listeners.known` gets a report after each of the first trials, and then at intervals.

    A report is made of all trials so far. One after every trial would take a time that grows with their square.
    """
    bench, done, reported = campaign.bench, 0, 0

    def so_far(why: str = "it goes on", *, explained: bool = False) -> Report:
        known = report(bench, interpreter.said, campaign.claims, origin, explained=explained)
        return replace(known, unfinished=why)

    def told(trial: Trial, verdicts: Mapping[str, Verdict]) -> None:
        nonlocal done, reported
        listeners.told(trial, verdicts)
        done += 1
        if listeners.known is not None and done - reported >= max(1, done // _EACH):
            reported = done
            listeners.known(so_far())

    interpreter = Interpreter(campaign, told)
    try:
        if listeners.known is not None:
            listeners.known(so_far())
        interpreter.run()
    except KeyboardInterrupt as stop:
        raise CutShortError(so_far(str(stop) or "interrupted", explained=True)) from stop
    except Exception as error:
        why = f"internal error: {type(error).__name__}: {error}"
        raise CutShortError(so_far(why, explained=True)) from error
    return report(bench, interpreter.said, campaign.claims, origin)


def _untried(backends: Sequence[str], trials: Sequence[Trial]) -> dict[str, str]:
    """Those of `backends`, which were named by hand, that this machine can try nothing on, each with the reason."""
    found = {}
    for backend in backends:
        lacking = [trial.lacking for trial in trials if trial.place[0] == backend]
        if lacking and all(lacking):
            found[backend] = lacking[0]
    return found


def planned(request: Request, bench: Bench) -> Campaign:
    """The trials that `request` asks for, and the claims that they are to judge.

    Raises `InputError` for claims and backends that `bench` does not know, and for a case that is none.
    """
    names = tuple(claim.name for claim in bench.claims)
    check_names("--claim", request.claims, names, "claim")
    check_names("--expected-failed", tuple(request.expected_failed), names, "claim")
    check_names("--backend", request.backends, bench.every_backend, "backend")
    trials = _exactly(request) if request.case is not None else _drawn(request, bench)
    judged = frozenset().union(*(bench.kinds.get(trial.kind, frozenset()) for trial in trials))
    return Campaign(
        bench=bench,
        trials=tuple(trials),
        claims=frozenset(request.claims or judged),
        # Each run of a script starts torch anew, and of a case only its layout says something to it.
        budget=request.budget if request.script is None else replace(request.budget, shrink_s=0.0),
        worlds=request.worlds,
        accumulations=request.accumulations,
        exact=request.case is not None,
    )


def _drawn(request: Request, bench: Bench) -> Sequence[Trial]:
    """The same trials in the same order, in whatever order the options name places: no verdict may depend on that."""
    budget = request.budget
    layout = Layout(
        tuple(sorted(request.backends or bench.backends, key=bench.every_backend.index)),
        tuple(sorted(request.worlds or budget.worlds)),
        tuple(sorted(request.accumulations or budget.accumulations)),
    )
    # A claim that is asked for by name is tried whatever the budget says of its kind.
    asked = tuple(kind for kind, judged in bench.kinds.items() if judged & set(request.claims))
    budget = replace(budget, kinds=asked) if request.claims else budget
    found = [trial for seed in request.seeds for trial in draw(seed, budget, layout, tuple(bench.kinds))]
    return list(dict.fromkeys(replace(trial, case=bench.suited(trial.case)) for trial in found))


def _exactly(request: Request) -> Sequence[Trial]:
    assert request.case is not None
    (backend,), (world,), (accumulation,) = request.backends, request.worlds, request.accumulations
    try:
        return [
            read_trial(request.case, backend=backend, world=world, accumulation=accumulation, seed=request.seeds[0])
        ]
    except ValueError as error:
        raise InputError([Problem("--case", str(error))]) from None


def origin_of(request: Request) -> Origin:
    """Now, here, with these libraries; what is known of a bundled subject as installed, and what the user says."""
    peer = PEERS.get(request.subject) if request.script is None else None
    name = request.name or request.script or request.subject
    known = {(name, claim): reason for (_, claim), reason in (peer.expectations if peer is not None else {}).items()}
    return Origin(
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=versions(peer.measured if peer is not None else ()),
        machine=fingerprint(),
        expected=known | {(name, claim): reason for claim, reason in request.expected_failed.items()},
        excused=tuple(request.expected_failed),
    )


_ALWAYS = ("andon", "torch", "transformers", "peft")


def versions(more: Iterable[str] = ()) -> dict[str, str]:
    """The installed versions by name: Python, ours, the libraries that we train with, and `more`."""
    found = {name: installed(name) for name in dict.fromkeys((*_ALWAYS, *more))}
    return {"python": platform.python_version()} | {name: number for name, number in found.items() if number}


def fingerprint() -> dict[str, str]:
    """What bits depend on: the processor, the operating system, torch with its build."""
    import torch

    found = {"cpu": _processor(), "os": f"{platform.system()} {platform.machine()}", "torch": torch.__version__}
    if torch.cuda.device_count():
        found["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return found


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
