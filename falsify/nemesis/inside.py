"""Faults inside one rank: it raises, sleeps, never joins, starts from something else, or computes a wrong number."""

from __future__ import annotations

import struct
import time
from functools import partial
from pathlib import Path

from .language import INLINE, Fault, Guard, Nemesis, Promise, planted
from .planting import Option, Plant, Struck, UnavailableError
from .plants import WEIGHTS
from .run import TIMEOUT_S, Launch, Run

_AT = 7
"""The update in which most faults strike."""
_WITHIN_S = 3.0
"""Two seconds for the end of all ranks, and one for the update itself."""
_OFF = ("contracts.enabled=false",)
_CHECKED = Guard("contracts.enabled", "exit 0 instead of 70|exit 1 instead of 70", _OFF)
_COMPARED = Guard("contracts.enabled", "exit 0 instead of 70|exit 71 instead of 70", _OFF)


def _inside(name: str, how: str, promise: Promise, fault: Fault, guard: Guard, workers: str = "3") -> Nemesis:
    """Resumed with all ranks in one process: this is faster and has the same bits."""
    launched, resumed = Launch(workers), Launch(workers, INLINE)
    return Nemesis(name, how, promise, fault, guard, launched=launched, resumed=resumed)


def _other(name: str, how: str, function: str, says: str, **options: Option) -> Nemesis:
    """Rank 1 starts from something else than rank 0."""
    broken = "start-agrees broken|layout-equal broken|content-planned broken"
    promise = Promise((70,), (broken, says), 15.0, at_once=True)
    return _inside(f"other {name}", how, promise, planted(function, rank=1, **options), _COMPARED, "2")


def _config(name: str, key: str, value: Option, says: str = "configuration") -> Nemesis:
    return _other(name, f"{key}={value} on rank 1", "other_config", says, key=key, value=value)


def _broken(*says: str) -> Promise:
    return Promise((70,), says, _WITHIN_S, at_once=True)


def _wrong(name: str, how: str, fault: Fault, *says: str) -> Nemesis:
    return _inside(name, f"{how} in update {_AT}", _broken(*says, f"step {_AT}"), fault, _CHECKED)


def _flipped(name: str, how: str, what: str, clause: str) -> Nemesis:
    how, fault = f"the sign of {how}", _at_step("flips", what=what)
    return _wrong(f"flipped {name}", how, fault, f"{clause} broken", "rank 1")


def _flip_from_outside(run: Run) -> Struck:
    """Change the sign of the first nonzero weight through `/proc/PID/mem`."""
    shown = run.scratch / WEIGHTS
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
    except (FileNotFoundError, PermissionError) as error:
        raise UnavailableError(f"/proc/{pid}/mem: {error.strerror}") from error
    # The update under way may have compared its weights already.
    return Struck(at, step + 1, f"weight {place} of process {pid} was {values[place]:.3e}, is {after:.3e}")


_at_step = partial(planted, rank=1, step=_AT)

NEMESES = (
    _inside(
        *("rank raises", f"RuntimeError on rank 1 of 3 in update {_AT}"),
        Promise((1,), ("rank 1 of 3: RuntimeError: planted",), 2.0),
        _at_step("raises"),
        Guard(
            "reports of ranks",
            "not said: 'rank 1 of 3: RuntimeError: planted'",
            plants=(Plant.of("silent", target="andon.launch.rank:_record"),),
        ),
    ),
    _inside(
        *("slow rank", f"rank 1 sleeps 3 s in update {_AT}, run.timeout_s={TIMEOUT_S:g}", Promise((0,))),
        _at_step("sleeps", seconds=3.0),
        Guard("a timeout above the sleep", "exit 72 instead of 0", ("run.timeout_s=1.5",)),
        "2",
    ),
    _inside(
        *("rank never joins", f"rank 1 of 3 is started and does not connect, run.timeout_s={TIMEOUT_S:g}"),
        Promise((72,), ("rank 1",), TIMEOUT_S + 4.0, at_once=True),
        planted("never_joins", rank=1),
        Guard("run.timeout_s", "not over", ("run.timeout_s=600",)),
    ),
    _config("learning rate", "optimizer.lr", 0.005),
    _config("seed", "seed", 43),
    _config("adapter rank", "adapter.r", 3, "tensors differ"),
    _other("order of rows", "each batch reversed on rank 1", "other_order", "plan|rows"),
    _other("base", "one frozen weight + 1 on rank 1", "other_base", "base"),
    _other("tokenizer", "the last token of each text left out on rank 1", "other_tokens", "tokenizer|plan"),
    _other("library", "another version of torch on rank 1", "other_library", "versions"),
    _wrong(
        *("NaN loss", "a loss of rank 1 of 3 is NaN", _at_step("loss_is_nan"), "finite broken", "rank 1", "rows are")
    ),
    _flipped("weight", "a weight of rank 1 of 3 flips", "weights", "replicas-agree"),
    _inside(
        *("weight flipped from outside", "the sign of a weight of rank 1 of 3 flips, by /proc/PID/mem"),
        _broken("replicas-agree broken", "rank 1"),
        Fault(_flip_from_outside, plants=_at_step("shows_weights").plants),
        _CHECKED,
    ),
    _flipped(
        *("reduced gradient", "an element flips on rank 1 of 3 after the reduction", "gradient", "gradients-agree")
    ),
    Nemesis(
        "flipped local gradient",
        f"the sign of an element flips on rank 1 of 3 before the reduction, in update {_AT}; all is audited",
        _broken("audit broken", "rank", f"step {_AT}"),
        _at_step("flips", what="own"),
        Guard("contracts.audit_every=1", _CHECKED.finds, ("contracts.audit_every=0",)),
        launched=Launch("3", ("contracts.audit_every=1", "contracts.audit_coverage=all")),
        resumed=Launch("3", INLINE),
    ),
    _flipped("moment", "a moment of rank 1 of 3 flips", "moments", "optimizers-agree"),
    _wrong(
        *("other rate in one update", "rank 1 of 3 takes twice the learning rate", _at_step("other_rate")),
        *("learning-rate-planned broken", "rank 1"),
    ),
    _wrong(
        *("step passed over", "rank 1 of 3 skips one batch", _at_step("skips_a_step")),
        *("halt-together", "rank 1"),
    ),
)
