"""Wrong numbers on one rank: a loss, a weight, a gradient, a moment, a rate, a step that is passed over."""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from andon_falsify.nemesis.planting import PLANTS, Planted
from andon_falsify.nemesis.plants import where_weights_lie
from andon_falsify.nemesis.protocol import Nemesis, NotStruckError, Option, Plant, Promise, Struck
from andon_falsify.nemesis.run import Run

_AT = 7
_WITHIN_S = 3.0
"""Two seconds to the end of all, and the update itself."""
_UNSEEN = "exit 0 instead of 70|exit 1 instead of 70"


@dataclass(frozen=True, kw_only=True)
class FlippedFromOutside(Planted):
    """One bit of a weight of a rank, by `/proc/PID/mem`, from another process."""

    def needs(self) -> str | None:
        """Another process's memory may be written by who may trace it."""
        if not Path("/proc/self/mem").exists():
            return "there is no /proc/PID/mem"
        scope = Path("/proc/sys/kernel/yama/ptrace_scope")
        strict = scope.exists() and scope.read_text().strip() != "0"
        return "the kernel lets nobody trace (ptrace_scope)" if strict and os.geteuid() else None

    def inject(self, run: Run) -> Struck:
        """Turn the sign of the first weight that is not zero."""
        shown = where_weights_lie(run.scratch)
        run.wait_for(shown.exists, "the rank had shown where its weights lie")
        pid, address, size = map(int, shown.read_text().split())
        try:
            with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
                memory.seek(address)
                values = struct.unpack(f"{size // 4}f", memory.read(size))
                place = next(place for place, value in enumerate(values) if value)
                at, step = time.monotonic(), run.steps
                memory.seek(address + 4 * place)
                memory.write(struct.pack("f", -values[place]))
                memory.seek(address + 4 * place)
                (after,) = struct.unpack("f", memory.read(4))
        except OSError as error:
            raise NotStruckError(f"/proc/{pid}/mem: {error.strerror}") from error
        # The update under way may have compared its weights already.
        return Struck(at, step + 1, f"weight {place} of process {pid} was {values[place]:.3e}, is {after:.3e}")


def _wrong(
    name: str, number: int | tuple[int, ...], how: str, function: str, says: tuple[str, ...], **options: Option
) -> Planted:
    return Planted(
        name=name,
        numbers=number if isinstance(number, tuple) else (number,),
        how=f"{how} in update {_AT}",
        promise=Promise((70,), (*says, f"step {_AT}"), _WITHIN_S, at_once=True),
        plant=Plant.of(f"{PLANTS}:{function}", rank=1, step=_AT, **options),
        workers="3",
        guard="contracts.enabled",
        finds=_UNSEEN,
        off_settings=("contracts.enabled=false",),
        tier="seconds" if function == "loss_is_nan" else "minutes",
    )


_AUDITED = ("contracts.audit_every=1", "contracts.audit_coverage=all")

NEMESES: tuple[Nemesis, ...] = (
    _wrong("NaN loss", 29, "a loss of rank 1 of 3 is NaN", "loss_is_nan", ("finite broken", "rank 1", "rows are")),
    _wrong(
        "flipped weight",
        30,
        "the sign of a weight of rank 1 of 3 flips",
        "flips",
        ("replicas-agree broken", "rank 1"),
        what="weights",
    ),
    FlippedFromOutside(
        name="weight flipped from outside",
        numbers=(30,),
        how="the sign of a weight of rank 1 of 3 flips, by /proc/PID/mem",
        promise=Promise((70,), ("replicas-agree broken", "rank 1"), _WITHIN_S, at_once=True),
        plant=Plant.of(f"{PLANTS}:shows_weights", rank=1, step=_AT),
        workers="3",
        guard="contracts.enabled",
        finds=_UNSEEN,
        off_settings=("contracts.enabled=false",),
    ),
    _wrong(
        "flipped reduced gradient",
        31,
        "the sign of an element flips on rank 1 of 3 after the reduction",
        "flips",
        ("gradients-agree broken", "rank 1"),
        what="gradient",
    ),
    Planted(
        name="flipped local gradient",
        numbers=(31,),
        how=f"the sign of an element flips on rank 1 of 3 before the reduction, in update {_AT}; all is audited",
        promise=Promise((70,), ("audit broken", "rank", f"step {_AT}"), _WITHIN_S, at_once=True),
        plant=Plant.of(f"{PLANTS}:flips", rank=1, step=_AT, what="own"),
        workers="3",
        settings=_AUDITED,
        guard="contracts.audit_every=1",
        finds=_UNSEEN,
        off_settings=("contracts.audit_every=0",),
    ),
    _wrong(
        "flipped moment",
        32,
        "the sign of a moment of rank 1 of 3 flips",
        "flips",
        ("optimizers-agree broken", "rank 1"),
        what="moments",
    ),
    _wrong(
        "other rate in one update",
        32,
        "rank 1 of 3 takes twice the learning rate",
        "other_rate",
        ("learning-rate-planned broken", "rank 1"),
    ),
    _wrong(
        "step passed over", (22, 23), "rank 1 of 3 goes on with the next", "skips_a_step", ("halt-together", "rank 1")
    ),
)
