"""A campaign in lines: what is about to be run, what each trial said, what came of each claim."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from andon_falsify.campaign.findings import Finding, Report
from andon_falsify.campaign.interpreter import Bench, Campaign
from andon_falsify.campaign.reasons import NOTHING_SAID, condensed
from andon_falsify.campaign.trial import Trial
from andon_falsify.verdict import Outcome, Verdict

_PLACES = 3
_COUNTED = re.compile(r"\d+ more counterexamples")
"""What a judge says who keeps only some; here they are counted below."""


def opening_line(bench: Bench, campaign: Campaign) -> str:
    """`andon 0.1.0 on inline, gloo; budget quick, seed 7: 36 trials, 20 of 21 claims`."""
    places = dict.fromkeys(trial.place[0] for trial in campaign.trials if trial.place[0])
    seeds = sorted({trial.seed for trial in campaign.trials})
    shown = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}" if seeds else "no seed"
    name = f"{bench.subject} {bench.version}".strip()
    how = "exactly one case" if campaign.exact else f"budget {campaign.budget.name}"
    claims = f"{len(campaign.claims)} of {len(bench.claims)} claims"
    return f"{name} on {', '.join(places) or 'no backend'}; {how}, {shown}: {len(campaign.trials)} trials, {claims}"


def trial_line(trial: Trial, verdicts: Mapping[str, Verdict]) -> str:
    """`law at gloo, world 2, accumulation 1: 13 hold, 1 falsified`."""
    backend, world, accumulation = trial.place
    place = f"{trial.kind} at {backend}, world {world}, accumulation {accumulation}" if world else trial.kind
    counts = {outcome: sum(each.outcome is outcome for each in verdicts.values()) for outcome in Outcome}
    return f"{place}: {', '.join(f'{count} {outcome.value}' for outcome, count in counts.items() if count)}"


def verdict_lines(report: Report, *, cut_short: bool = False, rest: str = "in the file of --json") -> Iterator[str]:
    """Every claim with its verdict, then the claims and backends that were left out. The closing line is the caller's.

    cut_short: claims of which nothing was said yet are only named. rest: where the other counterexamples are.
    """
    unsaid, shared = [], "" if cut_short else _shared_reason(report)
    if shared:
        yield f"no claim can be judged: {shared}"
    for verdict in report.verdicts:
        own = [finding for finding in report.findings if finding.claim == verdict.claim]
        if cut_short and verdict.why == NOTHING_SAID:
            unsaid.append(verdict.claim)
            continue
        yield f"{verdict.claim} v{own[0].version}: {_outcome(verdict, own, shared)}{_expected(report, own[0], verdict)}"
        yield from counterexample_lines(verdict, rest)
    known = {claim for _, claim in report.expected if claim not in report.excused}
    if any(verdict.claim in known and verdict.outcome is Outcome.FALSIFIED for verdict in report.verdicts):
        yield 'a known defect counts as falsified (exit code 1); --expected-failed "CLAIM: REASON" excuses it'
    if unsaid:
        yield f"not tried yet ({len(unsaid)}): {', '.join(unsaid)}"
    if report.not_selected:
        yield f"not selected ({len(report.not_selected)}): {', '.join(report.not_selected)}"
    for backend, why in report.untried.items():
        yield f"nothing was run on {backend}, which was asked for: {why}"
    if report.unfinished:
        yield f"not all was tried: {report.unfinished}"


def counterexample_lines(verdict: Verdict, rest: str = "in the file of --json") -> Iterator[str]:
    """The first counterexample, which is the smallest, and the command that repeats it; how many more there are.

    rest: where those are.
    """
    for found in verdict.counterexamples[:1]:
        yield f"  {replace(found, seed=None, repro='')}"
        if found.repro:
            yield f"  repeat with: {found.repro}"
    if len(verdict.counterexamples) > 1:
        yield f"  and {len(verdict.counterexamples) - 1} more ({rest})"


def said_besides(verdict: Verdict) -> str:
    """Its reasons, without a count of counterexamples."""
    return "; ".join(each for each in verdict.why.split("; ") if not _COUNTED.fullmatch(each))


def _shared_reason(report: Report) -> str:
    """The one reason for which all of several claims are unknown, "" if there is none: it is said once."""
    judged = [verdict for verdict in report.verdicts if verdict.outcome is not Outcome.NOT_APPLICABLE]
    reasons = {condensed(said_besides(verdict)) for verdict in judged}
    unknown = all(verdict.outcome is Outcome.UNKNOWN for verdict in judged)
    return reasons.pop() if unknown and len(reasons) == 1 and len(judged) > 1 else ""


def _outcome(verdict: Verdict, findings: list[Finding], shared: str) -> str:
    """shared: a reason that was said already."""
    why = condensed(said_besides(verdict))
    why = "" if why == shared else why
    if verdict.outcome is Outcome.HOLDS:
        return f"holds ({verdict.checked} comparisons" + (f"; {why})" if why else ")")
    places = _places([finding for finding in findings if finding.outcome is verdict.outcome])
    at = f" at {places}" if places and verdict.outcome is not Outcome.NOT_APPLICABLE else ""
    return f"{verdict.outcome.value}{at}" + (f" ({why})" if why else "")


def _places(findings: list[Finding]) -> str:
    """`gloo, world 2, accumulation 1 and 2; gloo, world 3, accumulation 2`; at most three, and how many more."""
    held: dict[str, set[int]] = {}
    for finding in findings:
        place = replace(finding, accumulation=0).place
        if place:
            held.setdefault(place, set()).add(finding.accumulation)
    named = [
        f"{place}, accumulation {' and '.join(map(str, sorted(own)))}" if all(own) else place
        for place, own in sorted(held.items())
    ]
    more = f"; and {len(named) - _PLACES} more places" if len(named) > _PLACES else ""
    return "; ".join(named[:_PLACES]) + more


def _expected(report: Report, finding: Finding, verdict: Verdict) -> str:
    reason = report.expected.get((finding.subject, finding.claim))
    fell = "as expected" if finding.claim in report.excused else "known"
    word = fell if verdict.outcome is Outcome.FALSIFIED else "but expected to fall"
    return "" if reason is None else f", {word}: {reason}"
