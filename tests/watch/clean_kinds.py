"""Every kind of right loop, by name: what 1,000 steps of each must not make a watch say anything about."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from tests.watch import blind, clean_communication, clean_peers, clean_rows, clean_state, clean_variety
from tests.watch.clean import Kind, Seen
from tests.watch.clean_communication import Course, Holding, Merged, Parting, inside_step, merged, reduced, taught
from tests.watch.clean_loops import (
    RightLoop,
    adamw,
    annealed,
    by_hand,
    by_sign,
    compiled,
    compiled_to_code,
    ddp_finding_unused,
    ddp_views,
    falling,
    foreach,
    fused,
    held_in_a_tensor,
    lbfgs,
    momentum,
    of_a_subclass,
    permuted,
    sgd,
    slow_warm_up,
    steady_warm_up,
    warm_up,
)
from tests.watch.clean_models import (
    Caching,
    Checkpointed,
    FromZero,
    LayerDrop,
    LayerNormed,
    Normed,
    SparseEmbedding,
    WithUnused,
)
from tests.watch.clean_twins import planted
from tests.watch.clean_variety import COURSES, MODELS, OPTIMIZERS, REDUCTIONS, WRAPPERS
from tests.watch.watched import all_told

UNUSED = {"allow": {"gradient-present": "the layer is there for another task"}}

PARTS = frozenset({"replicas-agree"})
"""Of loops whose weights part at first one suspicion is said."""

KINDS = {
    "plain loop": Kind(RightLoop(wrap=by_hand)),
    "plain loop, gradients zeroed, not None": Kind(RightLoop(wrap=by_hand, set_to_none=False)),
    "plain loop, all lines told": Kind(all_told, ("transformers", "peft"), "heavy"),
    "DDP": Kind(RightLoop()),
    "DDP, gradient views, static graph": Kind(RightLoop(wrap=ddp_views, clip=0.1)),
    "FSDP2": Kind(clean_peers.sharded),
    "AdamW foreach, clipping": Kind(RightLoop(optimizer=foreach, clip=1.0)),
    "AdamW fused": Kind(RightLoop(optimizer=fused)),
    "SGD": Kind(RightLoop(optimizer=sgd)),
    "SGD with momentum, clipping by norm": Kind(RightLoop(optimizer=momentum, clip=0.05)),
    "SGD, clipping by value": Kind(RightLoop(optimizer=sgd, clip_value=0.01)),
    "accumulation 4, clipping": Kind(RightLoop(accumulate=4, clip=0.1)),
    "ragged last batch, accumulation": Kind(RightLoop(ragged=True, accumulate=2)),
    "bf16 autocast": Kind(RightLoop(model=Normed, autocast=torch.bfloat16)),
    "fp16, scaler that skips": Kind(RightLoop(scaled=True, autocast=torch.float16, clip=1.0)),
    "fp16, scaler that skips, AdamW fused": Kind(RightLoop(scaled=True, autocast=torch.float16, optimizer=fused)),
    "fp16, scaler that skips, plain loop": Kind(RightLoop(scaled=True, autocast=torch.float16, wrap=by_hand)),
    "fp16, scaler that skips, gradients zeroed through the module": Kind(
        RightLoop(scaled=True, autocast=torch.float16, zero_module=True, clip=1.0)
    ),
    "fp16, scaler that skips, gradients zeroed through the module, not None": Kind(
        RightLoop(scaled=True, autocast=torch.float16, zero_module=True, set_to_none=False, clip=1.0)
    ),
    "fp16, scaler that skips, rows and losses told": Kind(clean_state.scaled_and_told),
    "warm-up from learning rate 0": Kind(RightLoop(rate=warm_up, told={"schedule": warm_up})),
    "batch norm, dropout, accumulation": Kind(RightLoop(model=Normed, accumulate=4)),
    "batch norm, evaluation on one rank": Kind(RightLoop(model=Normed, optimizer=momentum, evaluate=True)),
    "unused parameters, DDP": Kind(RightLoop(model=WithUnused, wrap=ddp_finding_unused)),
    "unused parameters, plain loop, allowed": Kind(RightLoop(model=WithUnused, wrap=by_hand, told=UNUSED)),
    "layer drop, DDP": Kind(RightLoop(model=LayerDrop, wrap=ddp_finding_unused)),
    "layer drop, plain loop, SGD": Kind(RightLoop(model=LayerDrop, wrap=by_hand, optimizer=sgd)),
    "layer drop alike on all ranks": Kind(RightLoop(model=LayerDrop, wrap=by_hand, one_seed=True, accumulate=2)),
    "checkpointed activations, tied weights": Kind(RightLoop(model=Checkpointed)),
    "sparse gradients": Kind(RightLoop(model=SparseEmbedding, optimizer=sgd)),
    "dropout and batch norm, audited": Kind(clean_state.audited),
    "average of weights": Kind(clean_state.averaged),
    "two optimizers": Kind(clean_state.two_optimizers),
    "two optimizers in turn": Kind(clean_state.alternating),
    "LBFGS": Kind(RightLoop(optimizer=lbfgs, closure=True)),
    "resumed in the middle": Kind(clean_state.resumed),
    "groups clipped apart": Kind(RightLoop(clip=0.05, clip_apart=True, told={"clip": 0.05})),
    "clipped by the largest element": Kind(RightLoop(clip=0.01, clip_order=float("inf"), told={"clip": 0.01})),
    "clipped by the sum of magnitudes": Kind(RightLoop(clip=0.1, clip_order=1.0, told={"clip": 0.1})),
    "rate in a float32 tensor, planned": Kind(
        RightLoop(optimizer=held_in_a_tensor, rate=falling, told={"schedule": falling})
    ),
    "warm-up from a rate that rounds away": Kind(RightLoop(model=LayerNormed, rate=slow_warm_up)),
    "annealed to a rate that rounds away": Kind(RightLoop(model=LayerNormed, rate=annealed)),
    "residual branches that begin at 0, warm-up from 0": Kind(
        RightLoop(model=FromZero, optimizer=momentum, rate=steady_warm_up)
    ),
    "Rprop, a parameter of one element": Kind(RightLoop(model=LayerNormed, optimizer=by_sign)),
    "subclass that calls its parent's step": Kind(RightLoop(optimizer=of_a_subclass)),
    "permuted gradients, plain loop": Kind(RightLoop(wrap=permuted)),
    "cache that grows with the rows of a rank": Kind(RightLoop(model=Caching, wrap=by_hand, ragged=True)),
    "rows as arrays": Kind(clean_rows.Told(form=clean_rows.as_array, plan=True, scored=True)),
    "rows as scalars of others": Kind(clean_rows.Told(form=clean_rows.as_scalars)),
    "rows, resumed in mid-epoch": Kind(clean_rows.Told(start=8)),
    "rows, resumed in mid-epoch, planned": Kind(clean_rows.Told(start=8, plan=True)),
    "rows, batches left out on purpose": Kind(clean_rows.Told(skips=clean_rows.every_tenth)),
    "every rank scores all rows": Kind(clean_rows.Told(scored=True)),
    "step that reduces and deals out parameters": Kind(inside_step(clean_communication.dealt)),
    "step that reduces and deals out parameters, clipping": Kind(inside_step(clean_communication.dealt, clip=0.1)),
    "step that deals out parameters, DDP": Kind(RightLoop(optimizer=clean_communication.dealt_behind)),
    "step that deals out parameters, reduced by hand": Kind(
        RightLoop(optimizer=clean_communication.dealt_behind, wrap=by_hand)
    ),
    "step that reduces and deals out slices": Kind(inside_step(clean_communication.Sliced)),
    "step that deals out slices, DDP": Kind(RightLoop(optimizer=clean_communication.Sliced)),
    "ZeroRedundancyOptimizer": Kind(RightLoop(optimizer=clean_communication.zero_redundancy)),
    "local SGD": Kind(Parting(), suspected=PARTS),
    "local SGD, every update": Kind(Parting(every=1), suspected=PARTS),
    "local SGD, through .data": Kind(Parting(by="data"), suspected=PARTS),
    "local SGD, copied back": Kind(Parting(by="copy", every=7), suspected=PARTS),
    "local SGD, AdamW": Kind(Parting(optimizer=adamw), suspected=PARTS),
    "local SGD, no_sync of DDP": Kind(Parting(wrapped=True), suspected=PARTS),
    "local SGD behind a reduced warm-up": Kind(Parting(warm_up=6, model=LayerNormed), suspected=PARTS),
    "local SGD behind a reduced warm-up, DDP": Kind(Parting(warm_up=6, wrapped=True), suspected=PARTS),
    "local SGD inside the optimizer's step": Kind(
        Parting(every=10**9, optimizer=clean_communication.averaging), suspected=PARTS
    ),
    "PostLocalSGDOptimizer": Kind(clean_communication.post_local, suspected=PARTS),
    "DDP inside a task, with an average": Kind(Holding()),
    "DDP inside a task, with an average that has gradients": Kind(Holding(frozen=False)),
    "DDP inside a task, average on rank 0": Kind(Holding(on=(0,)), suspected=frozenset({"base-frozen"})),
    "DDP inside a task, the inner module watched": Kind(Holding(given="inner")),
    "two wrapped modules in one, adversaries": Kind(clean_communication.rivals),
    "mean teacher in the model": Kind(taught()),
    "mean teacher in the model, every third update": Kind(taught(every=3)),
    "momentum encoder, moved in the forward pass": Kind(taught(every=0)),
    "momentum encoder, by new data": Kind(taught(every=0, follow=clean_communication.by_new_data)),
    "ReLoRA": Kind(Course(model=Merged, behind=merged)),
    "torch.compile, traced": Kind(RightLoop(wrap=compiled), weight="heavy"),
    "torch.compile, to code": Kind(RightLoop(wrap=compiled_to_code), weight="slow"),
    "Accelerate": Kind(clean_peers.accelerated, ("accelerate",), "heavy"),
    "Lightning Fabric": Kind(clean_peers.fabric, ("lightning",), "heavy"),
    "Trainer of transformers": Kind(clean_peers.transformers_trainer, ("transformers", "accelerate"), "heavy"),
}


KINDS |= {f"DDP, {name}": Kind(RightLoop(optimizer=make), weight="many") for name, make in OPTIMIZERS.items()}
KINDS |= {f"plain loop, reduced: {name}": Kind(reduced(reduce), weight="many") for name, reduce in REDUCTIONS.items()}
KINDS |= {f"DDP, {name}": Kind(RightLoop(wrap=wrap), weight="many") for name, wrap in WRAPPERS.items()}
KINDS |= {f"DDP, {name}": Kind(RightLoop(model=model), weight="many") for name, model in MODELS.items()}
KINDS |= {f"DDP, {name}": Kind(course, weight="many") for name, course in COURSES.items()}
KINDS |= {name: Kind(loop) for name, loop in clean_variety.CHOICES.items()}
KINDS |= blind.KINDS
KINDS["DDP that leaves statistics to the ranks"] = Kind(RightLoop(model=Normed, wrap=clean_variety.own_buffers))


def installed(kind: Kind) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in kind.needs)


def run_kinds(names: Sequence[str], steps: int) -> dict[str, Seen]:
    """What a watch saw on this rank of each kind, of so many steps."""
    return {name: KINDS[name].run(steps) for name in names}


def run_twin(name: str, fault: str, steps: int) -> Seen:
    """What a watch saw on this rank of that kind with a fault of `clean_twins`."""
    with planted(fault):
        return KINDS[name].run(steps)


def unannounced(name: str, seen: Seen) -> tuple[str, ...]:
    """What was said of the kind beyond the suspicions that are announced of it, each once."""
    known = KINDS[name].suspected
    return (*seen.violations, *(said for said in seen.suspicions if said.partition(" ")[0] not in known))
