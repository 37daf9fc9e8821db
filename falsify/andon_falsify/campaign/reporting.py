"""From what trials said to the findings of a report: merged by claim and place, explained, and repeatable."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import isfinite

from andon_falsify.campaign.diagnosis import cause_of, diagnosed, explain, held_by_rest
from andon_falsify.campaign.findings import Finding, Report
from andon_falsify.campaign.interpreter import Bench, Said
from andon_falsify.campaign.reasons import NOTHING_SAID, condensed
from andon_falsify.campaign.trial import Trial
from andon_falsify.subjects.case import Case
from andon_falsify.verdict import Claim, Counterexample, Outcome, Verdict, merge, unknown

_KEPT = 3
"""Counterexamples of one trial that a report keeps; what follows from the first is rarely news."""


@dataclass(frozen=True)
class Origin:
    """When and where a campaign was run. See `Report`."""

    started: str
    versions: Mapping[str, str]
    machine: Mapping[str, str]
    expected: Mapping[tuple[str, str], str]
    excused: tuple[str, ...] = ()


def report(
    bench: Bench, said: Sequence[Said], selected: frozenset[str], origin: Origin, *, explained: bool = True
) -> Report:
    """All findings about `bench`. A selected claim of which nothing was said is unknown; the others are listed.

    explained: ratios are compared over all counterexamples, which a report of a campaign that goes on can do without.
    """
    by_claim: dict[str, list[Said]] = {}
    for each in said:
        by_claim.setdefault(each.verdict.claim, []).append(each)
    selected_claims = [claim for claim in bench.claims if claim.name in selected]
    findings = [_findings(bench, claim, by_claim.get(claim.name, []), explained) for claim in selected_claims]
    return Report(
        started=origin.started,
        versions=origin.versions,
        machine=origin.machine,
        findings=tuple(chain.from_iterable(findings)),
        runs=bench.runs,
        not_selected=tuple(claim.name for claim in bench.claims if claim.name not in selected),
        expected=dict(origin.expected),
        excused=origin.excused,
        statements={claim.name: claim.statement for claim in bench.claims},
    )


def _findings(bench: Bench, claim: Claim, said: Sequence[Said], explained: bool) -> list[Finding]:
    """One finding a place; that of the smallest counterexample first, and in it this counterexample."""
    if not said:
        nothing = unknown(claim, NOTHING_SAID)
        return [_finding(bench, claim, ("", 0, 0), 0, nothing, ())]
    explain_each = _explanation(said) if explained else _as_found
    by_place: dict[tuple[str, int, int], list[Said]] = {}
    for each in sorted(said, key=lambda each: not each.shrunk):
        by_place.setdefault(each.trial.place, []).append(each)
    found = []
    for place, held in by_place.items():
        verdict = merge(_made_repeatable(bench, each, explain_each) for each in held)
        finding = _finding(
            bench,
            claim,
            place,
            held[0].trial.seed,
            replace(verdict, reasons=(condensed(verdict.why),) if verdict.why else ()),
            _curve(held),
        )
        found.append(finding)
    return found


def _finding(
    bench: Bench, claim: Claim, place: tuple[str, int, int], seed: int, verdict: Verdict, curve: tuple[float, ...]
) -> Finding:
    backend, world, accumulation = place
    return Finding(
        claim=claim.name,
        version=claim.version,
        subject=bench.subject,
        subject_version=bench.version,
        backend=backend,
        world=world,
        accumulation=accumulation,
        outcome=verdict.outcome,
        why=verdict.why,
        checked=verdict.checked,
        counterexamples=verdict.counterexamples,
        seed=seed,
        curve=curve,
        curve_name="seen / law, by update" if curve else "",
        curve_law=1.0 if curve else None,
    )


Explain = Callable[[Counterexample, Case], Counterexample]
"""Adds to a counterexample of a case what its ratio equals."""


def _as_found(found: Counterexample, _: Case) -> Counterexample:
    return found


def _explanation(said: Sequence[Said]) -> Explain:
    """By what all ratios of the claim have in common, but for those of which the judge said the cause."""
    held = held_by_rest(each.trial.case for each in said if each.verdict.outcome is Outcome.HOLDS)
    pairs = [(found, each.trial.case) for each in said for found in each.verdict.counterexamples[:1]]
    measured = [(found.ratio, case) for found, case in pairs if found.ratio is not None and not cause_of(found)]
    common = explain(measured, held)
    return lambda found, case: diagnosed(found, case, common, held)


def _made_repeatable(bench: Bench, said: Said, explain_each: Explain) -> Verdict:
    """The verdict with its first counterexamples, each with its explanation, its seed and its command."""
    if not said.verdict.counterexamples:
        return said.verdict
    command = repeating(bench, said.trial, said.verdict.claim)
    found = [explain_each(each, said.trial.case) for each in said.verdict.counterexamples[:_KEPT]]
    named = tuple(replace(each, seed=said.trial.seed, repro=command) for each in found)
    return replace(said.verdict, counterexamples=named)


def repeating(bench: Bench, trial: Trial, claim: str) -> str:
    """The command that runs exactly this trial again, and says what it says of the claim."""
    backend, world, accumulation = trial.place
    words = ["andon", "falsify", *bench.words]
    words += ["--backend", backend, "--world", str(world), "--accumulation", str(accumulation)]
    return shlex.join([*words, "--seed", str(trial.seed), "--claim", claim, "--case", trial.written()])


def _curve(said: Sequence[Said]) -> tuple[float, ...]:
    """The ratios of the first trial that has one at several updates."""
    for each in said:
        ratios = [found.ratio for found in each.verdict.counterexamples if found.ratio is not None]
        if len(ratios) > 1 and all(map(isfinite, ratios)):
            return tuple(ratios)
    return ()
