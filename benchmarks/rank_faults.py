"""All ranks' words on a fault on one: `torchrun --standalone --nproc-per-node 4 -m benchmarks.rank_faults`.

On GPUs if each rank has one (NCCL), on CPUs otherwise (gloo). A small model with dropout, AdamW and clipping. Each
round takes one good update, plants a fault on one rank (a bit flipped in its weights, its moments, its frozen weights,
the gradient of a micro-batch, a partial sum, the reduced gradient; a NaN in a loss, in a gradient; rows, rate,
clipping, count of updates), and takes two more. All ranks must raise the same violation at the same step, with that
rank as the culprit. What only an audit can see is audited in full, and is said of two ranks, the one that computed and
the one that did so again. Prints a table and JSON; 0 if all is as it must be. Of two ranks that differ neither is known
to be wrong, so fewer than three are refused.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from andon.backend.devices import demand_determinism
from andon.backend.group import GroupBackend, groups_of
from andon.step.audit import AuditSpec
from andon.step.keyed import KeyedRandomness
from andon.step.plan import rank_leaves
from andon.step.replica import Replica
from andon.step.step import TrainingStep
from andon.step.task import Task
from andon_contracts.violation import Violation
from benchmarks.runs import table
from tests.support.faults import FAULTS, SETTINGS, PoisonedTask
from tests.support.toy import SEED, ToyModel, ToyTask, rate, trainable

_PATIENCE_S = 60
"""After so long ranks that wait for one which raised nothing end with an error: that is then what was found."""
STEP = 2
"""The update before which a fault is planted."""
_OF_ONE_SUBTREE = "micro-batches out of order"
"""No fault on a rank whose micro-batches are one subtree, as each of four has it."""


@dataclass(frozen=True)
class Case:
    """A fault on the rank `culprit`; clause: what must be said of it."""

    name: str
    clause: str
    culprit: int
    plant: Callable[[Replica], None]
    task: Task


@dataclass(frozen=True)
class Seen:
    """The violation that one rank raised; no clause: none."""

    clause: str = ""
    step: int = 0
    ranks: tuple[int, ...] = ()

    def fits(self, case: Case) -> bool:
        """Whether it names the clause, the step and the culprit; an audit names two ranks."""
        named = case.culprit in self.ranks and len(self.ranks) == 1 + (case.clause == "audit")
        return (self.clause, self.step) == (case.clause, STEP) and named


def main() -> int:
    """Plant all on every rank in turn."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    local, world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world < 3:
        raise SystemExit("three ranks or more are needed, to tell who is wrong")
    name = "nccl" if torch.cuda.device_count() >= world else "gloo"
    device = torch.device("cuda", local) if name == "nccl" else torch.device("cpu")
    demand_determinism([device])
    if name == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(groups_of(name), timeout=datetime.timedelta(seconds=_PATIENCE_S))
    backend = GroupBackend(name, device)
    try:
        rows = []
        for case in cases(world):
            rows.append(_row(case, _found(backend, device, case)))
            if backend.ranks[0] == 0 and not rows[-1]["good"]:
                print(rows[-1], flush=True)
    finally:
        backend.close()
        dist.destroy_process_group()
    if backend.ranks[0] == 0:
        _print(name, world, rows)
    return 0 if all(row["good"] for row in rows) else 1


def cases(world: int) -> Iterable[Case]:
    """Every fault on every rank."""
    for culprit in range(world):
        for name, fault in FAULTS.items():
            if name != _OF_ONE_SUBTREE:
                yield Case(name, fault.clause, culprit, fault.plant, ToyTask())
        yield Case("frozen weight flipped", "base-frozen", culprit, _flip_frozen, ToyTask())
        yield Case("gradient of a micro-batch flipped", "audit", culprit, _flip_leaf, ToyTask())
        yield Case("partial sum flipped", "audit", culprit, _flip_sum, ToyTask())
        row = _a_row_of(culprit, world)
        yield Case("NaN in a loss", "finite", culprit, _nothing, PoisonedTask(row, "loss"))
        yield Case("NaN in a gradient", "finite", culprit, _nothing, PoisonedTask(row, "gradient"))


def _found(backend: GroupBackend, device: torch.device, case: Case) -> list[tuple[Seen, float]]:
    """Each rank's violation, and the seconds until it did."""
    torch.manual_seed(0)
    model = ToyModel().to(device)
    replica = Replica(model, trainable(model), SETTINGS.optimizer, KeyedRandomness(SEED, device), device)
    spec = AuditSpec(int(case.clause == "audit"), None)
    step = TrainingStep(backend, [replica], case.task, SETTINGS.micro_batches, SETTINGS.clip_norm, spec)
    step.attest_start({})
    base, batches = replica.base_digest(), SETTINGS.batches()
    step(batches[0], rate(1), 1)
    if backend.ranks[0] == case.culprit:
        case.plant(replica)
    began = time.perf_counter()
    seen = Seen()
    try:
        for pending in [step.launch(batch, rate(batch.step), batch.step) for batch in batches[1:]]:
            pending.result()
        step.attest_base(STEP, base)
    except Violation as violation:
        seen = Seen(violation.clause, violation.step, violation.finding.ranks)
    mine: list[Any] = [None] * backend.world_size
    dist.all_gather_object(mine, (seen, time.perf_counter() - began))
    return mine


def _row(case: Case, found: list[tuple[Seen, float]]) -> dict[str, Any]:
    said = {seen for seen, _ in found}
    return {
        "fault": case.name,
        "on rank": case.culprit,
        "said": "; ".join(sorted(f"{each.clause} at step {each.step} on {list(each.ranks)}" for each in said)),
        "ms": round(1e3 * max(seconds for _, seconds in found), 1),
        "good": len(said) == 1 and all(each.fits(case) for each in said),
    }


def _print(name: str, world: int, rows: list[dict[str, Any]]) -> None:
    print(table(["fault", "on rank", "said by all", "ms", "good"], [list(row.values()) for row in rows]))
    good = sum(row["good"] for row in rows)
    print(json.dumps({"backend": name, "ranks": world, "good": good, "of": len(rows), "settings": asdict(SETTINGS)}))


def _a_row_of(culprit: int, world: int) -> int:
    """A row that the rank `culprit` computes at `STEP`."""
    leaf = rank_leaves(SETTINGS.micro_batches, world)[culprit][0]
    batch = SETTINGS.batches()[STEP - 1]
    share, rest = divmod(len(batch.ids), SETTINGS.micro_batches)
    return batch.ids[leaf * share + min(leaf, rest)]


def _nothing(_: Replica) -> None:
    """The task has the fault."""


def _flip(flat: torch.Tensor) -> None:
    flat.view(torch.int32)[3] ^= 1 << 11


def _flip_frozen(replica: Replica) -> None:
    _flip(replica.model.get_parameter("frozen.bias").data)


def _flip_leaf(replica: Replica) -> None:
    inner = replica._leaf

    def wrong(*given: Any, **named: Any) -> Any:
        report = inner(*given, **named)
        replica._leaf = inner  # type: ignore[method-assign]
        _flip(replica.parameters.gradient)
        return report

    replica._leaf = wrong  # type: ignore[method-assign]


def _flip_sum(replica: Replica) -> None:
    inner = replica.gradients

    def wrong(*given: Any, **named: Any) -> Any:
        partial = inner(*given, **named)
        replica.gradients = inner  # type: ignore[method-assign]
        _flip(next(iter(partial.roots.values())))
        return partial

    replica.gradients = wrong  # type: ignore[method-assign]


if __name__ == "__main__":
    raise SystemExit(main())
