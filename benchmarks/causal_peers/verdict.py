"""What a first update's gradient says of how tokens were weighed, and what the last weights say of the layouts.

Pure functions of what was seen and of the law's sums, one for each row. The law is their sum, divided once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from andon_falsify.reference.causal import TokenSum, mean_of, token_sum
from andon_falsify.reference.decoder import Decoder
from andon_falsify.reference.params import canonical
from andon_falsify.verdict import Outcome
from benchmarks.causal_peers.job import Layout, Seen, model, rows

BOUND = 2e-5
"""How far from the law fp32 may be, as a relative L2 over all tensors: that of `gradient-law` for any loop."""
ALIKE = 1e-4
"""How far apart weights may end, as a share of their movement."""


@dataclass(frozen=True)
class Finding:
    """The verdict on a layout's first gradient. off: its relative L2 from the law. says: what it is instead."""

    outcome: Outcome
    off: float = 0.0
    says: str = ""


@cache
def row_sums(trained: str) -> tuple[TokenSum, ...]:
    """The law's sums of each row at the weights before training."""
    fresh = model()
    params = canonical(dict(fresh.named_parameters()))
    decoder = Decoder.from_config(fresh.config.to_dict())
    return tuple(token_sum(decoder, params, list(params), row) for row in rows(trained))


def flat(gradient: Mapping[str, Tensor]) -> Tensor:
    """All tensors end to end by name, in float64."""
    return torch.cat([gradient[name].double().flatten() for name in sorted(gradient)])


def _mean(sums: Sequence[TokenSum]) -> Tensor:
    return flat(mean_of(sums)[1])


def _explained(seen: Sequence[Seen], sums: Sequence[TokenSum]) -> Iterator[tuple[str, Tensor]]:
    """Gradients that rows dealt out like these have by weightings with a name."""
    parts = [[[sums[row] for row in rows] for rows in each.forwards] for each in seen]
    micro = [_mean(part) for of_rank in parts for part in of_rank]
    ranks = [_mean([one for part in of_rank for one in part]) for of_rank in parts]
    windows = [_mean([one for part in parts_of for one in part]) for parts_of in zip(*parts, strict=True)]
    yield "a mean over micro-batches of each one's mean over its own tokens", torch.stack(micro).mean(0)
    yield "a mean over ranks of each one's mean over its own tokens", torch.stack(ranks).mean(0)
    yield "a mean over accumulation steps of the mean over all ranks' tokens", torch.stack(windows).mean(0)


def judge(layout: Layout, seen: Sequence[Seen]) -> Finding:
    """Is the gradient of the first update the law's? `seen` is what each rank saw."""
    errors = [each.error for each in seen if each.error]
    if errors:
        return Finding(Outcome.UNKNOWN, says=errors[0])
    visited = sorted(row for each in seen for rows in each.forwards for row in rows)
    sums = row_sums(layout.trained)
    if visited != list(range(len(sums))):
        return Finding(Outcome.UNKNOWN, says=f"the first update is not of each row once: {visited}")
    found, law = flat(seen[0].gradient), _mean(sums)
    off = _distance(found, law)
    if off <= BOUND:
        return Finding(Outcome.HOLDS, off)
    return Finding(Outcome.FALSIFIED, off, _reason(found, law, sums, dict(_explained(seen, sums))))


def _reason(found: Tensor, law: Tensor, sums: Sequence[TokenSum], named: Mapping[str, Tensor]) -> str:
    ratio = float(found @ law / (law @ law))
    if _distance(found, ratio * law) <= BOUND:
        tokens, counted = sum(one.tokens for one in sums), sum(one.tokens for one in sums) + len(sums)
        if abs(ratio - tokens / counted) < BOUND:
            return (
                f"ratio {ratio:.4f} = {tokens} / {counted}: each row's first token, which nothing predicts, is counted"
            )
        return f"ratio {ratio:.4f} of the law"
    for name, wanted in named.items():
        size = float(found @ wanted / (wanted @ wanted))
        if _distance(found, size * wanted) <= BOUND:
            times = "" if abs(size - 1) <= BOUND else f"{size:.4f} of "
            return f"{times}{name}; {_shares(found, sums)}"
    return _shares(found, sums)


def _shares(found: Tensor, sums: Sequence[TokenSum]) -> str:
    """How much a token of each row counts, as a multiple of what it should, where rows alone make the gradient."""
    own = torch.stack([flat(one.gradients) for one in sums], dim=1)
    weights = torch.linalg.lstsq(own, found[:, None]).solution[:, 0]
    if _distance(own @ weights, found) > BOUND:
        return "no weighting of the rows' own gradients makes it: what one row computes depends on another"
    shares = weights * sum(one.tokens for one in sums)
    least, most = int(shares.argmin()), int(shares.argmax())
    return (
        f"a token of row {least} ({sums[least].tokens} trained) counts {shares[least]:.3f} of its share, "
        f"one of row {most} ({sums[most].tokens} trained) {shares[most]:.3f}"
    )


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def apart(by_layout: Mapping[Layout, Sequence[Seen]]) -> tuple[float, Layout | None]:
    """How far weights part between the first layout and any other after the last update, as a share of how far that one
    moved, and where most. 0 and None where there are no two. Runs that failed are left out.
    """
    whole = {layout: flat(seen[0].weights) for layout, seen in by_layout.items() if not any(one.error for one in seen)}
    if len(whole) < 2:
        return 0.0, None
    (_, one), *others = whole.items()
    moved = float((one - flat(dict(model().named_parameters())).detach()).norm())
    distances = {layout: float((weights - one).norm()) / moved for layout, weights in others}
    worst = max(distances, key=lambda layout: distances[layout])
    return distances[worst], worst
