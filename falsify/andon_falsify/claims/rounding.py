"""What rounding does to a script, measured: its run on one rank against runs from weights that are rounded once more.

The watch writes a linear sketch of the first gradient, see `andon_contracts.watch.checks.sketch`. The product of two
sketches estimates that of the gradients over all elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from operator import mul

from andon_falsify.claims.evidence import SCRIPT
from andon_falsify.history import FP32_BITS, History
from andon_falsify.verdict import ExtraRun

PERTURBED: tuple[ExtraRun, ...] = ("perturbed 1", "perturbed 2", "perturbed 3", "perturbed 4")
BLIND = 0.01
"""The largest noise of the factor with which a run can be judged."""
_MARGIN, _LATER = 5.0, 10.0
"""Times the noise: at the first gradient, and for norms and losses, of which many are compared."""
_FLOOR, _RESIDUAL = 3e-3, 1e-3
"""The smallest tolerances: of a run in less than fp32, and in fp32 of the part that no factor explains."""
_DOUBLINGS = 6


@dataclass(frozen=True)
class Rounding:
    """The noise of one rounding to `bits` bits: root mean squares over runs, relative.

    factor, residual: of the first gradient, along that of the unperturbed run and across it. numbers: of the numbers of
    an update, by field and update, the largest so far.
    """

    bits: int = FP32_BITS
    factor: float = 0.0
    residual: float = 0.0
    numbers: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    @property
    def coarse(self) -> bool:
        return self.bits < FP32_BITS

    def allowed(self, name: str, number: int) -> float:
        """The relative difference that rounding may cause in a number at an update: it doubles in the first ones."""
        exact = SCRIPT.norm * 2.0 ** min(number - 1, _DOUBLINGS)
        coarse = self.coarse and name != "lr"
        return max(exact, _FLOOR, _LATER * self.numbers.get(name, {}).get(number, 0.0)) if coarse else exact

    @property
    def allowed_factor(self) -> float:
        return max(_FLOOR, _MARGIN * self.factor) if self.coarse else SCRIPT.norm

    @property
    def allowed_residual(self) -> float:
        return max(_FLOOR, _MARGIN * self.residual) if self.coarse else _RESIDUAL

    def note(self, apart: tuple[float, float] | None) -> str:
        """`within the noise of one bf16 rounding: factor 1.0004 +- 0.0030`; "" in fp32."""
        if not self.coarse:
            return ""
        kind = {8: "bf16", 11: "fp16 or TF32"}.get(self.bits, f"{self.bits}-bit")
        shown = "no gradient to compare"
        if apart is not None:
            rest = f"the rest {apart[1]:.2%} of its norm, at most {self.allowed_residual:.2%}"
            shown = f"factor {apart[0]:.4f} +- {self.allowed_factor:.4f}, {rest}"
        return f"within the noise of one {kind} rounding, measured in {len(PERTURBED)} runs: first gradient, {shown}"


EXACT = Rounding()


class _Roughly(Rounding):
    """Compares only the first update of two equal runs in less than fp32: a GPU may sum in another order."""

    def allowed(self, name: str, number: int) -> float:
        return BLIND if number == 1 else inf


def roughly(bits: int) -> Rounding:
    return _Roughly(bits) if bits < FP32_BITS else EXACT


def apart(ours: History, theirs: History) -> tuple[float, float] | None:
    """First gradient of `theirs` as a factor of that of `ours`, and the relative norm of the rest. None if unknown."""
    one, other = ours.sketch, theirs.sketch
    if not one or len(one) != len(other) or not all(map(isfinite, (*one, *other))) or not any(one):
        return None
    square = _product(one, one)
    factor = _product(one, other) / square
    return factor, sqrt(sum((b - factor * a) ** 2 for a, b in zip(one, other, strict=True)) / square)


def measured(base: History, perturbed: Sequence[History]) -> Rounding:
    """The noise in `perturbed`, runs of the layout of `base`."""
    found = [each for run in perturbed if (each := apart(base, run)) is not None]
    factor, residual = _rms([f - 1 for f, _ in found]), _rms([rest for _, rest in found])
    names = ("grad_norm", "loss", "weights_norm")
    return Rounding(base.bits, factor, residual, {name: dict(_largest(name, base, perturbed)) for name in names})


def _largest(name: str, base: History, perturbed: Sequence[History]) -> Iterator[tuple[int, float]]:
    largest = 0.0
    for number, step in base.trajectory.items():
        numbers = [getattr(run.trajectory.get(number), name, None) for run in perturbed]
        before = getattr(step, name)
        if before is not None and before.value:
            differences = [n.value / before.value - 1 for n in numbers if n is not None and n.value is not None]
            largest = max(largest, _rms(differences))
        yield number, largest


def _rms(values: Sequence[float]) -> float:
    return sqrt(_product(values, values) / len(values)) if values else 0.0


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return float(sum(map(mul, one, other)))
