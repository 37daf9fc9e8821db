"""The GPUs of the ranks: each rank reports its own, and pure functions judge all reports alike on every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from andon.console.problems import InputError, Problem, ProblemList

_GIB = 2**30
_NAME_CHARACTERS, _FAULT_CHARACTERS = 80, 200
_MESSAGE_BYTES = 2048
"""Room for a name and a fault of so many characters, each of which JSON may write as six bytes."""


@dataclass(frozen=True)
class Accelerator:
    """A GPU as its rank finds it: its index on its machine, its model, and bytes (0: it did not answer).

    fault: why it cannot be used, in the words of its driver; "" if it can.
    """

    index: int
    name: str
    total: int
    free: int
    fault: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def look_at(index: int) -> Accelerator:
    """Query GPU `index`, and let it compute something. An error becomes its `fault`. Starts CUDA on it."""
    try:
        free, total = torch.cuda.mem_get_info(index)
        torch.ones(1, device=torch.device("cuda", index)).add_(1).item()
        return Accelerator(index, torch.cuda.get_device_name(index)[:_NAME_CHARACTERS], total, free)
    except (RuntimeError, AssertionError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Accelerator(index, "", 0, 0, line[:_FAULT_CHARACTERS])


def of_all_ranks(mine: Accelerator | None) -> dict[int, Accelerator]:
    """The GPU of every rank that has one, by rank. Collective over the default group.

    It uses the CPU group, because a broken GPU cannot send, and JSON, so that nothing is unpickled.
    """
    text = json.dumps(None if mine is None else mine.as_dict()).encode()
    sent = torch.tensor(list(text.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)
    rows = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, sent)
    told = (json.loads(bytes(row.tolist())) for row in rows)
    return {rank: Accelerator(**fact) for rank, fact in enumerate(told) if fact is not None}


def none_works(found: Mapping[int, Accelerator]) -> str:
    """Why none of these GPUs (by rank) can be used, in the words of the first; "" if any can, or there are none.

    Only then may a run fall back to the CPU (clause cpu-fallback). If some GPUs work, the user would rather hear of the
    broken one.
    """
    faults = [each.fault for _, each in sorted(found.items())]
    return faults[0] if faults and all(faults) else ""


def refuse_unfit(backend: str, found: Mapping[int, Accelerator], needed: int | None, remedy: str = "") -> None:
    """Raise `InputError` with all that keeps ranks from training on these GPUs (rank to GPU). The same on every rank.

    needed: bytes that must be free on each, from the plan; None: not known. remedy: what to do if a GPU is too small.
    Different models of GPU give different bits, so `nccl` refuses them.
    """
    problems = ProblemList()
    for rank, each in sorted(found.items()):
        where = f"run.devices[{rank}]"
        if each.fault:
            problems.add(where, f"GPU {each.index} cannot be used: {each.fault}")
        elif needed is not None and each.free < needed:
            problems.add(where, _too_small(each, needed, remedy))
    names = sorted({each.name for each in found.values() if not each.fault})
    if backend == "nccl" and len(names) > 1:
        held = ", ".join(f"rank {rank} {each.name}" for rank, each in sorted(found.items()) if not each.fault)
        problems.add(
            "run.devices", f"GPUs of different models give different bits ({held}); choose equal ones or mixed"
        )
    problems.raise_if_any()


def _too_small(each: Accelerator, needed: int, remedy: str) -> str:
    have = f"GPU {each.index} ({each.name}) has {in_gib(each.free)} of {in_gib(each.total)} free"
    if each.total < needed:
        return f"{have}, too small for the {in_gib(needed)} that the run needs; {remedy}"
    return f"{have} and the run needs {in_gib(needed)}: another process may hold the rest"


def refuse_without_nccl(backend: str, available: bool | None = None) -> None:
    """Raise `InputError` for `nccl` if torch was built without it. available: None asks torch."""
    if backend == "nccl" and not (dist.is_nccl_available() if available is None else available):
        raise InputError([Problem("run.backend", "this torch was built without NCCL; choose gloo, or mixed")])


def in_gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def gpus_here() -> Sequence[Accelerator]:
    """All GPUs of this machine. Starts CUDA on each."""
    return [look_at(index) for index in range(torch.cuda.device_count())]
