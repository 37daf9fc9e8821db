"""Turns the verdicts of trials into findings: ratios are explained, and every counterexample gets its command.

A ratio is explained by a product of the case's numbers: "4.000 = accumulation 2 x world 2". One case cannot tell
accumulation 2 from world 2, so the ratios of all cases in which a claim fell are explained together.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose, isfinite, prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from andon_falsify.campaign.trial import Trial
from andon_falsify.claims.explain import fitting_powers, name_product, show_ratio
from andon_falsify.report.findings import Finding
from andon_falsify.subjects.case import Case
from andon_falsify.verdict import Claim, Counterexample, Outcome, Verdict, merge, unknown

if TYPE_CHECKING:
    from andon_falsify.campaign.bench import Bench

_KEPT = 3
"""Counterexamples of one trial in a report; the later ones usually follow from the first."""
_LAYOUT = ("accumulation", "world")
_NO_LAYOUT: Mapping[str, int] = {"world": 1, "micro_batches": 1, "batch_size": 1}
_NO_SUMS = ("learning rate", "loss", "weights")
"""Quantities that are not summed over ranks or micro-batches, so that no sum can be their mistake."""

Powers = Mapping[str, int]
Measured = tuple[float, Case]
Held = Mapping[Case, Sequence[Case]]
"""Cases in which a claim holds, by the case without its layout; see `held_by_rest`."""

_CAUSES = {
    "accumulation 1, world 1": "the loss was not divided",
    "world 1": "summed over the ranks instead of averaged",
    "accumulation 1": "summed over the micro-batches of a rank instead of averaged",
    "world -1": "divided by the number of ranks once too often, or not summed over them",
    "accumulation -1": "divided by the accumulation once too often, or only one micro-batch of it counts",
    "accumulation -1, world -1": "divided by accumulation and world size once too often",
    "world 2": "multiplied by the number of ranks twice",
    "world -2": "divided by the number of ranks twice",
    "global batch 1": "summed over the rows instead of averaged",
    "global batch -1": "divided by the rows of the batch once too often",
    "local batch 1": "summed over the rows of a micro-batch instead of averaged",
    "local batch -1": "divided by the rows of a micro-batch once too often",
    "updates of an epoch 1": "summed over the updates of an epoch",
}
"""The usual mistake that gives a ratio, by the powers of its factors."""


@dataclass(frozen=True)
class TrialVerdict:
    """The verdict of one trial on one claim. shrunk: it is the smallest counterexample that was found."""

    trial: Trial
    verdict: Verdict
    shrunk: bool = False


def findings(bench: Bench, claim: Claim, said: Sequence[TrialVerdict], *, explained: bool = True) -> list[Finding]:
    """One finding for each place, the smallest counterexample first; unknown if no trial judged the claim.

    explained: explain ratios. Reports that are written while a campaign goes on do without.
    """
    found = dict[tuple[str, int, int], list[TrialVerdict]]()
    for each in sorted(said, key=lambda each: not each.shrunk):
        found.setdefault(each.trial.place, []).append(each)
    held = held_by_rest(each.trial.case for each in said if each.verdict.outcome is Outcome.HOLDS)
    firsts = [(example, each.trial.case) for each in said for example in each.verdict.counterexamples[:1]]
    measured = [(each.ratio, case) for each, case in firsts if each.ratio is not None and not each.cause]
    common = explain(measured, held) if explained else None

    def named(each: TrialVerdict) -> Verdict:
        kept = list[Counterexample]()
        for example in each.verdict.counterexamples[:_KEPT]:
            known = diagnosed(example, each.trial.case, common, held) if explained else example
            kept.append(replace(known, seed=each.trial.seed, repro=repeating(bench, each.trial, claim.name)))
        return replace(each.verdict, counterexamples=tuple(kept))

    def finding(place: tuple[str, int, int], verdict: Verdict, seed: int = 0) -> Finding:
        backend, world, accumulation = place
        return Finding(
            **vars(verdict),
            version=claim.version,
            subject=bench.subject,
            subject_version=bench.version,
            backend=backend,
            world=world,
            accumulation=accumulation,
            seed=seed,
        )

    if not said:
        return [finding(("", 0, 0), unknown(claim, "no trial tested it"))]
    return [finding(place, merge(map(named, own)), own[0].trial.seed) for place, own in found.items()]


def repeating(bench: Bench, trial: Trial, claim: str) -> str:
    """The command that runs exactly this trial again and judges the claim."""
    backend, world, accumulation = trial.place
    words = ["andon", "falsify", *bench.words, "--backend", backend, "--world", str(world)]
    words += ["--accumulation", str(accumulation), "--seed", str(trial.seed), "--claim", claim, "--case", trial.written]
    return shlex.join(words)


@dataclass(frozen=True)
class Explanation:
    """Powers of factors that give every measured ratio; several if the cases cannot tell them apart.

    sign: -1 if all ratios are negative. Without powers the ratio is the sign alone.
    """

    products: tuple[Powers, ...]
    sign: int = 1

    def fits(self, ratio: float, case: Case) -> bool:
        """Whether it gives this ratio too."""
        factors = _factors(case)
        return all(_same(self.sign * _product(factors, powers), ratio) for powers in self.products or ({},))

    def of(self, ratio: float, case: Case, quantity: str = "other") -> str:
        """`4.000 = accumulation 2 x world 2: the loss was not divided`, for a ratio that it fits."""
        named = " or ".join(sorted(name_product(_factors(case), powers) for powers in self.products)) or "the sign"
        signed = f"-1 x {named}" if self.sign < 0 and self.products else named
        if quantity in _NO_SUMS:
            return f"{show_ratio(ratio)} = {signed.replace('world ', 'world size ')}"
        alone = sorted(self.products[0].items()) if len(self.products) == 1 else []
        cause = _CAUSES.get(", ".join(f"{name} {power}" for name, power in alone), "")
        return f"{show_ratio(ratio)} = {signed}" + (f": {cause}" if cause and self.sign > 0 else "")


def held_by_rest(cases: Iterable[Case]) -> Held:
    """Group `cases` that differ only in their layout; the key is the case with a fixed layout."""
    found: dict[Case, list[Case]] = {}
    for case in cases:
        found.setdefault(case.but(**_NO_LAYOUT), []).append(case)
    return found


def explain(measured: Sequence[Measured], held: Held = MappingProxyType({})) -> Explanation | None:
    """The simplest products that give every ratio of `measured`, or None: no product fits, or all ratios are 1.

    A product is ruled out if it would have shown in a case of `held` that differs in its layout alone. World size and
    accumulation are preferred to batch sizes that are no simpler: a batch is a product of the two, so that it fits by
    chance whatever they fit.
    """
    signs = {1 if ratio > 0 else -1 for ratio, _ in measured}
    if len(signs) != 1 or any(not isfinite(ratio) or ratio == 0 for ratio, _ in measured):
        return None
    (sign,) = signs
    if all(_same(abs(ratio), 1.0) for ratio, _ in measured):
        return Explanation((), sign) if sign < 0 else None
    cases = [(ratio, _factors(case)) for ratio, case in measured]
    layout = fitting_powers([(ratio, {name: factors[name] for name in _LAYOUT}) for ratio, factors in cases])
    sizes = fitting_powers(cases)
    simplest = layout if layout and (not sizes or _complexity(layout) <= max(2, _complexity(sizes))) else sizes
    if not simplest:
        return None
    alike = [_factors(each) for _, case in measured for each in held.get(case.but(**_NO_LAYOUT), ())] if held else []
    unseen = [powers for powers in simplest if all(_same(_product(each, powers), 1.0) for each in alike)]
    return Explanation(tuple(unseen or simplest), sign)


def _same(ratio: float, other: float) -> bool:
    return isclose(ratio, other, rel_tol=1e-3)


def _product(factors: Mapping[str, int], powers: Powers) -> float:
    return prod(float(factors[name]) ** power for name, power in powers.items())


def _complexity(fitting: Sequence[Powers]) -> int:
    return sum(power * power for power in fitting[0].values())


def _factors(case: Case) -> dict[str, int]:
    return {
        "accumulation": case.accumulation,
        "world": case.world,
        "local batch": case.local_batch,
        "global batch": case.global_batch,
        "updates of an epoch": case.updates_of_epoch(case.global_batch),
    }


def diagnosed(
    found: Counterexample, case: Case, common: Explanation | None, held: Held = MappingProxyType({})
) -> Counterexample:
    """`found` with its ratio explained: by `common`, the explanation of all cases, if that fits, else by itself.

    Unchanged if it has no ratio, if nothing explains it, or if its check knows the cause. held: see `explain`.
    """
    if found.ratio is None or found.cause:
        return found
    own = common if common is not None and common.fits(found.ratio, case) else explain([(found.ratio, case)], held)
    return found if own is None else replace(found, equals=own.of(found.ratio, case, found.quantity))


def mistake(found: Counterexample, case: Case) -> tuple[str, ...]:
    """What a smaller counterexample must keep: the cause, or the factors of its ratio, or else the quantity."""
    return (found.cause,) if found.cause else factors_of(found, case) or (found.quantity,)


def factors_of(found: Counterexample, case: Case) -> tuple[str, ...]:
    """The names of the factors that explain the ratio of `found`; empty without a ratio or an explanation."""
    explanation = explain([(found.ratio, case)]) if found.ratio is not None else None
    return tuple(sorted({name for each in explanation.products for name in each})) if explanation is not None else ()
