"""What a run on GPUs may need of their memory, agreed on before the first step and held against what it did need.

Compiled passes mostly need less than eager ones, so for them the plan is only a bound, and no GPU is refused for it.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping

import torch

from andon.backend.base import Backend
from andon.backend.machine import look_at, of_all_ranks, refuse_unfit
from andon.console.messages import say
from andon.console.problems import InputError
from andon.model.memory import MemoryPlan
from andon.training.material import Material
from andon.training.study import NotPlannable, Study, smaller_settings, with_graphs_that_fit
from andon_contracts.laws.law import Judgement
from andon_contracts.laws.update import BUDGET, Peaks

_GROUPED = ("nccl", "mixed")


def agree_on_devices(material: Material, backend: Backend) -> MemoryPlan | None:
    """What each GPU replica may need; None if no rank is on a GPU, or if it cannot be planned.

    Collective where ranks are on GPUs. Raises `InputError`, the same on every rank, for a GPU with too little memory
    free. What else keeps GPUs from training was refused before a backend was made on them.
    """
    if backend.name not in _GROUPED:
        return None
    device = backend.devices[0]
    found = of_all_ranks(look_at(device.index or 0) if device.type == "cuda" else None)
    if not found:
        return None
    study = Study(material)
    planned = _planned(study, backend)
    # Compiled passes may fit where the bound does not.
    if planned is None or material.config.training.compile != "off":
        refuse_unfit(backend.name, found, None)
        return planned
    planned = with_graphs_that_fit(planned, material.config, min(each.free for each in found.values()))
    working = [each.total for each in found.values() if not each.fault]
    too_small = planned.needed > min(working, default=0)
    remedy = _fitting_setting(study, backend.world_size, min(working)) if working and too_small else ""
    refuse_unfit(backend.name, found, planned.needed, remedy)
    return planned


def _fitting_setting(study: Study, workers: int, size: int) -> str:
    """What to do if the run needs more than the `size` bytes of a GPU: the first setting with which it fits."""
    for setting, changed, price in smaller_settings(study.material.config):
        if changed.model.max_length != study.material.config.model.max_length:
            continue  # it needs the rows tokenised again
        try:
            plan = study.plan(changed, "cuda", workers)
        except InputError:  # this model or these rows do not allow it
            continue
        if with_graphs_that_fit(plan, changed, size).needed <= size:
            return f"it would fit with --set {setting} ({price})"
    return "no single setting would make it fit; andon plan says what needs most"


def _planned(study: Study, backend: Backend) -> MemoryPlan | None:
    """The plan of a GPU replica; None, with a warning, for a model that cannot be traced without memory."""
    try:
        return study.plan(study.material.config, "cuda", backend.world_size)
    except NotPlannable as error:
        if 0 in backend.ranks:
            say(f"warning: {error}")
        return None


def hold_to_budget(backend: Backend, step: int, planned: int) -> Mapping[str, int]:
    """What the run needed, in bytes, for the summary: `planned` and `peak` of GPUs, `process_peak` of this process.

    Collective where ranks are on GPUs. A peak above the plan is said, and the run keeps what it came to: a plan that is
    off makes no result wrong.
    """
    process = {"process_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if not planned:
        return process
    local = [
        torch.tensor([torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0], device=device)
        for device in backend.devices
    ]
    peaks = [int(peak) for peak in backend.gather(local)]
    judgement = Judgement(BUDGET, Peaks(peaks, planned, step))
    for law in judgement.broken():
        if 0 in backend.ranks:
            say(f"warning: {judgement.violation(law)}")
    return {"planned": planned, "peak": max(peaks), **process}
