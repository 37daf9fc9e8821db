"""A campaign in lines: what is about to be run, what each trial said, what came of each claim."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from andon_falsify.campaign.bench import Bench
from andon_falsify.campaign.interpreter import Campaign
from andon_falsify.campaign.outcome import Finding, Report
from andon_falsify.campaign.reasons import condensed
from andon_falsify.campaign.trial import Trial
from andon_falsify.verdict import Outcome, Verdict

_COUNTEREXAMPLES = 3
_PLACES = 3


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


def verdict_lines(report: Report) -> Iterator[str]:
    """Every claim with its verdict, then the claims that were left out. The closing line is the caller's."""
    for verdict in report.verdicts:
        own = [finding for finding in report.findings if finding.claim == verdict.claim]
        yield f"{verdict.claim} v{own[0].version}: {_outcome(verdict, own)}{_expected(report, own[0], verdict)}"
        for found in verdict.counterexamples[:_COUNTEREXAMPLES]:
            yield f"  {found}"
        if len(verdict.counterexamples) > _COUNTEREXAMPLES:
            yield f"  and {len(verdict.counterexamples) - _COUNTEREXAMPLES} more"
    if report.not_selected:
        yield f"not selected ({len(report.not_selected)}): {', '.join(report.not_selected)}"


def _outcome(verdict: Verdict, findings: list[Finding]) -> str:
    why = condensed(verdict.why)
    if verdict.outcome is Outcome.HOLDS:
        return f"holds ({verdict.checked} comparisons" + (f"; {why})" if why else ")")
    same = [finding.place for finding in findings if finding.outcome is verdict.outcome and finding.place]
    places = "; ".join(same[:_PLACES]) + (f"; and {len(same) - _PLACES} more places" if len(same) > _PLACES else "")
    at = f" at {places}" if places and verdict.outcome is not Outcome.NOT_APPLICABLE else ""
    return f"{verdict.outcome.value}{at}" + (f" ({why})" if why else "")


def _expected(report: Report, finding: Finding, verdict: Verdict) -> str:
    reason = report.expected.get((finding.subject, finding.claim))
    if reason is None:
        return ""
    return f", as expected: {reason}" if verdict.outcome is Outcome.FALSIFIED else f", but expected to fall: {reason}"
