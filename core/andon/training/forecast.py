"""`andon plan`: the bytes that a run will need on each device, for each number of workers (F-HET-002).

Nothing of the model is allocated or read but its configuration: its passes run on tensors that have no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from andon.backend.devices import placement
from andon.backend.host import free_ram
from andon.backend.machine import Accelerator, gpus_here
from andon.config.schema import Config
from andon.console.problems import InputError
from andon.model.memory import MemoryPlan
from andon.step.plan import efficiency, rank_leaves
from andon.training.material import prepare
from andon.training.notices import idleness
from andon.training.study import Study, largest, smaller_settings, updated_on_host, with_graphs_that_fit

_MIB = 2**20
CUDA_CONTEXT = 600 * _MIB
"""Bytes of a GPU beside torch's allocator: CUDA's context and the code of its kernels."""
NCCL_BUFFERS = 500 * _MIB
"""Bytes of NCCL on each GPU of a group of several."""
PROCESS = 500 * _MIB
"""Bytes of a process that has loaded torch, transformers and peft."""


@dataclass(frozen=True)
class Machine:
    """What there is. gpus: bytes free on each. ram: bytes that processes can still get, None where unknown."""

    gpus: tuple[int, ...]
    ram: int | None


@dataclass(frozen=True)
class Need:
    """One kind of device under one number of workers. ranks: those on it. budget: bytes free on each GPU, or in all.

    kind: 'cuda', 'cpu', or 'host' for the memory in which ranks build the model that they move to their GPUs.
    """

    kind: str
    ranks: int
    plan: MemoryPlan
    needed: int
    budget: int | None

    @property
    def fits(self) -> bool | None:
        """None: how much there is is not known."""
        return None if self.budget is None else self.needed <= self.budget

    def as_dict(self) -> dict[str, Any]:
        """Plain values, bytes each."""
        own = {"kind": self.kind, "ranks": self.ranks, "needed": self.needed, "budget": self.budget, "fits": self.fits}
        return own | {"each_rank": self.plan.as_dict()}


@dataclass(frozen=True)
class WorldPlan:
    """One number of workers: what it makes of M, and what it needs. problem: why it cannot be, "" if it can.

    idle: why some workers would never train on a row, "" if all do. note: what else there is to say of where they are.
    """

    workers: int
    leaves: tuple[int, ...]
    efficiency: float
    needs: tuple[Need, ...] = ()
    problem: str = ""
    idle: str = ""
    note: str = ""

    @property
    def fits(self) -> bool:
        """Whether nothing says that it does not."""
        return not self.problem and all(need.fits is not False for need in self.needs)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "workers": self.workers,
            "micro_batches_of_each": list(self.leaves),
            "efficiency": round(self.efficiency, 4),
            "fits": self.fits,
            "problem": self.problem,
            "idle": self.idle,
            "note": self.note,
            "devices": [need.as_dict() for need in self.needs],
        }


@dataclass(frozen=True)
class Remedy:
    """A setting with which a run would fit, the bytes that it would need then, and what the setting costs."""

    setting: str
    needed: int
    price: str


@dataclass(frozen=True)
class Forecast:
    """All that is said. remedy: for the first number of workers that does not fit; None if all fit, or no setting is
    enough."""

    rows: int
    length: int
    weights: int
    trained: int
    worlds: tuple[WorldPlan, ...]
    remedy: Remedy | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "micro_batch": {"rows": self.rows, "length": self.length},
            "weights": self.weights,
            "trained": self.trained,
            "worlds": [world.as_dict() for world in self.worlds],
            "remedy": None if self.remedy is None else asdict(self.remedy),
        }


def machine_here(gpu_bytes: int | None, workers: int) -> Machine:
    """This machine; gpu_bytes: another one, with a GPU of so many for each of `workers`, and any amount of memory."""
    found: Sequence[Accelerator] = gpus_here() if gpu_bytes is None else ()
    # To look at a GPU starts a context on it, which a plan counts by itself.
    free = (min(each.free + CUDA_CONTEXT, each.total) for each in found)
    gpus = tuple(free) if gpu_bytes is None else (gpu_bytes,) * workers
    return Machine(gpus, free_ram() if gpu_bytes is None else None)


def forecast(config: Config, workers: Sequence[int], machine: Machine) -> Forecast:
    """The plan for each of `workers`. Raises `InputError` for what a run would refuse before it reads weights."""
    material = prepare(config)
    config = material.config
    study = Study(material)
    worlds = tuple(_world(study, config, count, machine) for count in workers)
    short = next((world for world in worlds if not world.fits and not world.problem), None)
    rows, length = largest(material, config)
    weights, trained = study.sizes(config)
    remedy = None if short is None else _remedy(study, config, short, machine)
    return Forecast(rows, length, weights, trained, worlds, remedy)


def _world(study: Study, config: Config, workers: int, machine: Machine) -> WorldPlan:
    parts = config.training.micro_batches
    leaves = tuple(map(len, rank_leaves(parts, workers)))
    idle = idleness(study.material.plan, workers)
    named = config.run.devices if workers == config.run.workers else None
    try:
        backend, devices, note = placement(
            config.run.backend, workers, named, len(machine.gpus), fallback=config.run.cpu_fallback
        )
    except InputError as error:
        return WorldPlan(workers, leaves, efficiency(parts, workers), problem=str(error), idle=idle)
    needs = []
    gpus = [device.index for device in devices if device.type == "cuda"]
    if gpus:
        plan = study.plan(config, "cuda", workers)
        plan = replace(plan, outside=CUDA_CONTEXT + (NCCL_BUFFERS if workers > 1 and backend == "nccl" else 0))
        free = min(machine.gpus[index] for index in gpus)
        plan = with_graphs_that_fit(plan, config, free)
        needs.append(Need("cuda", len(gpus), plan, plan.needed, free))
        host = _on_host(study, config, plan, workers)
        needs.append(Need("host", len(gpus), host, len(gpus) * host.needed, machine.ram))
    if len(gpus) < workers:
        plan = replace(study.plan(config, "cpu", workers), outside=PROCESS)
        ranks = workers - len(gpus)
        needs.append(Need("cpu", ranks, plan, _in_ram(plan, ranks, backend), machine.ram))
    return WorldPlan(workers, leaves, efficiency(parts, workers), tuple(needs), idle=idle, note=note)


def _in_ram(plan: MemoryPlan, ranks: int, backend: str) -> int:
    """Bytes of all CPU ranks together: in one process they share it, and the base; in turn, the largest phase too."""
    if backend != "inline":
        return ranks * plan.needed
    lasting = plan.weights + plan.gradient + plan.moments + plan.partials
    phase = plan.needed - plan.outside - lasting - plan.base - plan.ramp
    return plan.outside + plan.base + plan.ramp + ranks * lasting + (phase if backend == "inline" else ranks * phase)


def _on_host(study: Study, config: Config, plan: MemoryPlan, workers: int) -> MemoryPlan:
    """What a rank holds of the machine's memory: while it builds the model for its GPU, or for its updates if more."""
    phases = [{"base": plan.base, "weights": plan.weights}]
    if updated_on_host(config, "cuda"):
        lasting = study.plan(config, "cpu", workers)
        phases.append({"weights": lasting.weights, "gradient": lasting.gradient, "moments": lasting.moments})
    kept = max(phases, key=lambda parts: sum(parts.values())) | {"outside": PROCESS}
    return MemoryPlan(**dict.fromkeys((part.name for part in fields(MemoryPlan)), 0) | kept)


def _remedy(study: Study, config: Config, short: WorldPlan, machine: Machine) -> Remedy | None:
    """The first setting with which `short` fits, from those that cost no accuracy to those that may."""
    lacking = max(
        (need for need in short.needs if need.fits is False), key=lambda need: need.needed - (need.budget or 0)
    )
    for setting, changed, price in smaller_settings(config):
        try:
            same_rows = changed.model.max_length == config.model.max_length  # else they are cut, and packed, otherwise
            world = _world(study if same_rows else Study(prepare(changed)), changed, short.workers, machine)
        except InputError:  # this model or these rows do not allow it
            continue
        if world.fits:
            needed = next((need.needed for need in world.needs if need.kind == lacking.kind), 0)
            return Remedy(setting, needed, price)
    return None
