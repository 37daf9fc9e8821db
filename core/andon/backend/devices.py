"""Devices by name, the placement of ranks (F-DP-004), deterministic kernels, and whether GPUs can be used.

Each rank reports its own GPU. Pure functions judge the gathered reports, so all ranks come to the same verdict.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from andon.config.schema import Run
from andon.console.messages import InputError, ProblemList
from andon_contracts.policy import clause, ensure
from andon_contracts.violation import Finding

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_SETTINGS = (":4096:8", ":16:8")  # with these, results are reproducible
NO_GPU = "use --backend auto to train on the CPU, or --set run.cpu_fallback=true to keep nccl and allow the CPU"
"""What to do if no GPU can be used."""
_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"(?P<cpu>cpu(:0)?)|cuda|(cuda:)?(?P<index>[0-9]{1,9})")
_NAME_CHARACTERS, _FAULT_CHARACTERS = 80, 200
_MESSAGE_BYTES = 4096  # fits a fault and three names; JSON may escape a character as six bytes


def named_devices(
    names: Sequence[str | int | torch.device],
    gpus: int | None = None,
    *,
    where: str = "run.devices",
    absent: Literal["refuse", "cpu"] = "refuse",
) -> tuple[torch.device, ...]:
    """Devices from names: `cpu`, or the index of a GPU (`0`, `cuda:0`). gpus: how many there are (None: ask torch).

    where: the name of the list in messages. absent: `cpu` puts the replica of a missing GPU on the CPU and logs a
    warning (clause cpu-fallback). Raises `InputError` listing every invalid name, missing GPU and repeated GPU. Several
    replicas can use the CPU.
    """
    problems = ProblemList()
    count = torch.cuda.device_count() if gpus is None else gpus
    devices: list[torch.device] = []
    used: set[int] = set()
    for place, name in enumerate(names):
        at = f"{where}[{place}]"
        match = _NAME.fullmatch(str(name).strip())
        if match is None:
            problems.add(at, f"{name!r} is not a device; write cpu, or the index of a GPU")
            continue
        device = torch.device("cpu")
        if not match["cpu"]:
            # torch would wrap an index of more than 8 bits, so it is compared first.
            index = int(match["index"] or 0)
            if index in used:
                problems.add(at, f"GPU {index} is named twice; a GPU holds one replica")
            elif index < count:
                device = torch.device("cuda", index)
            elif absent == "cpu":
                _LOG.warning("cuda:%d does not exist: replica %d trains on the CPU (clause cpu-fallback)", index, place)
            else:
                problems.add(at, f"GPU {index} does not exist; this machine has {count}")
            used.add(index)
        devices.append(device)
    problems.raise_if_any()
    return tuple(devices)


Placement = tuple[str, tuple[torch.device, ...], str]
"""The backend to use, a device for each worker, and a note for the user (or "")."""


def _explain_placement(run: Run, on_host: int | None, result: Placement) -> Finding:
    chosen, devices, note = result
    shown = f"and says {note!r}" if note else "and says nothing"
    became = f"became {chosen} on {', '.join(map(str, devices))}"
    return Finding(f"{run.backend} with {on_host or run.workers} workers {became} {shown}")


@clause("cpu-fallback", _explain_placement)
def _fallback_is_allowed_and_told(run: Run, on_host: int | None, result: Placement) -> bool:
    """Without a GPU, nccl becomes gloo on the CPU if allowed, and mixed uses CPUs only. Both need a note."""
    workers = run.workers if on_host is None else on_host
    chosen, devices, note = result
    on_cpu = all(device.type == "cpu" for device in devices)
    if chosen != run.backend or run.backend == "nccl":
        same = chosen == run.backend and not any(device.type == "cpu" for device in devices)
        return len(devices) == workers and (same or (run.cpu_fallback and chosen == "gloo" and on_cpu and note != ""))
    return len(devices) == workers and (run.backend != "mixed" or bool(run.devices) or not on_cpu or note != "")


@ensure(_fallback_is_allowed_and_told)
def placement(run: Run, gpus: int | None = None, *, on_host: int | None = None) -> Placement:
    """The backend and a device for each worker of one host (F-DP-004).

    gpus: how many this process sees (None: ask torch). on_host: the number of workers on this host (None: all of
    `run.workers`, of which the GPUs of this host are reused in turn if there are fewer).
    `nccl` without named devices gives each worker of a host a GPU, in order of local rank. A process that sees one GPU
    uses it, whatever its local rank: its launcher gave each process its own. With `run.cpu_fallback`, `nccl` becomes
    `gloo` on the CPU if there is no GPU at all. Raises `InputError` otherwise, and for a named device that does not
    exist.
    """
    cpu, backend, workers = torch.device("cpu"), run.backend, run.workers if on_host is None else on_host
    if run.devices:
        devices = named_devices(run.devices, gpus)
        if len(devices) != workers:
            raise InputError.at("run.devices", f"names {len(devices)} devices for the {workers} workers of this host")
        if backend == "nccl" and cpu in devices:
            raise InputError("run.devices: nccl needs a GPU for each worker, not cpu; for both kinds there is mixed")
        return backend, devices, ""
    count = torch.cuda.device_count() if gpus is None else gpus
    if backend == "nccl":
        if count == 0 and not run.cpu_fallback:
            raise InputError.at(
                "run.backend", f"nccl needs a GPU, and torch sees none on {socket.gethostname()}; {NO_GPU}"
            )
        if count == 0:
            note = "no GPU is usable here: training on the CPU with gloo instead of nccl (clause cpu-fallback)"
            return "gloo", (cpu,) * workers, note
        note = ""
        if count < workers:
            few = f"{workers} workers for {count} GPU{'s' * (count > 1)} of this host"
            if on_host is not None and count > 1:
                raise InputError.at("run.workers", f"{few}; nccl needs a GPU for each, or use --backend gloo for CPUs")
            note = f"{few}: the run needs further hosts (torchrun --nnodes), or --workers {count}" * (on_host is None)
        return backend, tuple(torch.device("cuda", index % count) for index in range(workers)), note
    if backend == "mixed":
        accelerators = tuple(torch.device("cuda", index) for index in range(min(count, workers - 1)))
        note = "" if accelerators else "no GPU is used: all workers of mixed are on the CPU (clause cpu-fallback)"
        return backend, accelerators + (cpu,) * (workers - len(accelerators)), note
    note = f"{count} GPUs are here and not used (--backend auto)" if count else ""
    return backend, (cpu,) * workers, note


def on_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [len(values)] on `device`, copied to a GPU from pinned memory, so that the host does not wait."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def demand_determinism(devices: Sequence[torch.device]) -> None:
    """Use deterministic kernels on `devices`; an operation without one raises. Must be called before CUDA starts.

    Raises `InputError` if the environment sets cuBLAS otherwise.
    """
    torch.use_deterministic_algorithms(mode=True)
    if all(device.type != "cuda" for device in devices):
        return
    # torch would fill new GPU memory with NaN, which takes 5 % of a compiled step. Comparing the digests of two runs
    # also detects a kernel that reads such memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    setting = os.environ.setdefault(_CUBLAS, _CUBLAS_SETTINGS[0])
    if setting not in _CUBLAS_SETTINGS:
        what = f"{setting!r} lets cuBLAS give other bits from run to run; set {' or '.join(_CUBLAS_SETTINGS)}"
        raise InputError.at(_CUBLAS, what)


@dataclass(frozen=True)
class Accelerator:
    """A GPU as its rank reports it: its index in that process, its model, and bytes (0: the query failed)."""

    index: int
    name: str
    total: int
    free: int
    fault: str = ""  # the driver's error if the GPU cannot be used
    host: str = ""
    uuid: str = ""  # of the GPU itself, whatever index a process sees it under

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def look_at(index: int) -> Accelerator:
    """Query GPU `index` and run a small kernel. An error becomes its `fault`. Starts CUDA on it."""
    host = socket.gethostname()[:_NAME_CHARACTERS]
    try:
        free, total = torch.cuda.mem_get_info(index)
        torch.ones(1, device=torch.device("cuda", index)).add_(1).item()
        of_gpu = torch.cuda.get_device_properties(index)
        return Accelerator(index, of_gpu.name[:_NAME_CHARACTERS], total, free, host=host, uuid=str(of_gpu.uuid))
    except (RuntimeError, AssertionError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Accelerator(index, "", 0, 0, line[:_FAULT_CHARACTERS], host)


def gpus_here() -> Sequence[Accelerator]:
    """All GPUs of this machine. Starts CUDA on each."""
    return [look_at(index) for index in range(torch.cuda.device_count())]


def of_all_ranks(mine: Accelerator | None) -> dict[int, Accelerator]:
    """The GPU of every rank that has one, by rank. Collective over the default group."""
    # Over CPUs, because a broken GPU cannot send, and in JSON, so that nothing is unpickled.
    text = json.dumps(None if mine is None else mine.as_dict()).encode()
    sent = torch.tensor(list(text.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)
    rows = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, sent)
    reports = (json.loads(bytes(row.tolist())) for row in rows)
    return {rank: Accelerator(**each) for rank, each in enumerate(reports) if each is not None}


def none_works(found: Mapping[int, Accelerator]) -> str:
    """The first fault if all of these GPUs (by rank) have one; "" if any works, or without GPUs.

    Only then may a run fall back to the CPU (clause cpu-fallback): if some GPUs work, the broken one is an error.
    """
    faults = [each.fault for _, each in sorted(found.items())]
    return faults[0] if faults and all(faults) else ""


def refuse_unfit(backend: str, found: Mapping[int, Accelerator], needed: int | None, remedy: str = "") -> None:
    """Raise `InputError` with all problems of these GPUs (by rank). The same on every rank.

    needed: bytes that must be free on each, from the plan; None: unknown. remedy: what to do if a GPU is too small.
    """
    problems = ProblemList()
    several_hosts = len({each.host for each in found.values()}) > 1
    users: dict[str, int] = {}
    for rank, each in sorted(found.items()):
        where = f"rank {rank} on {each.host}" if several_hosts else f"run.devices[{rank}]"
        if each.uuid and users.setdefault(each.uuid, rank) != rank:
            problems.add(where, f"GPU {each.index} is also used by rank {users[each.uuid]}; nccl needs one for each")
        elif each.fault:
            problems.add(where, f"GPU {each.index} cannot be used: {each.fault}")
        elif needed is not None and each.free < needed:
            have = f"GPU {each.index} ({each.name}) has {in_gib(each.free)} of {in_gib(each.total)} free"
            small = f"{have}, too small for the {in_gib(needed)} that the run needs; {remedy}"
            busy = f"{have} and the run needs {in_gib(needed)}: another process may hold the rest"
            problems.add(where, small if each.total < needed else busy)
    working = {rank: each.name for rank, each in sorted(found.items()) if not each.fault}
    if backend == "nccl" and len(set(working.values())) > 1:
        on = {rank: f" on {each.host}" if several_hosts else "" for rank, each in found.items()}
        held = ", ".join(f"rank {rank}{on[rank]} {name}" for rank, name in working.items())
        problems.add(
            "run.devices", f"GPUs of different models give different bits ({held}); choose equal ones or mixed"
        )
    problems.raise_if_any()


def in_gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def refuse_without_nccl(backend: str, available: bool | None = None) -> None:
    """Raise `InputError` for `nccl` if torch was built without it. available: None: ask torch."""
    if backend == "nccl" and not (dist.is_nccl_available() if available is None else available):
        raise InputError.at("run.backend", "this torch was built without NCCL; choose gloo, or mixed")
