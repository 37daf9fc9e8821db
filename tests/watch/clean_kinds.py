"""Every kind of right loop, by name: what 1,000 steps of each must not make a watch say anything about."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.watch import blind, clean_communication, clean_peers, clean_variety
from tests.watch.clean import Kind, Seen
from tests.watch.clean_communication import (
    Course,
    Dealt,
    Merged,
    Sliced,
    averaged,
    clipping,
    dealt_behind,
    holding,
    inside_step,
    merged,
    parting,
    reduced,
    taught,
)  # fmt: skip
from tests.watch.clean_loops import (
    RightLoop,
    adamw,
    by_hand,
    ddp_with,
    falling,
    momentum,
    of_a_subclass,
    permuted,
    sgd,
    warm_up,
)  # fmt: skip
from tests.watch.clean_models import (
    MODELS,
    Caching,
    LayerNormed,
    Normed,
    WithUnused,
    from_zero,
    layer_drop,
    sparse_embedding,
    tied,
)  # fmt: skip
from tests.watch.clean_rows import Told, as_array, as_scalars, every_tenth, loss_sum
from tests.watch.clean_twins import planted
from tests.watch.clean_variety import COURSES, OPTIMIZERS, REDUCTIONS, WRAPPERS
from tests.watch.loop import Model, plan
from tests.watch.watched import all_told

UNUSED = {"allow": {"gradient-present": "the layer is there for another task"}}


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW in one kernel, which itself skips an update that overflowed."""
    return adamw(parameters, fused=True)


PARTS = frozenset({"replicas-agree"})
"""Of loops whose weights part at first one suspicion is said."""

KINDS = {
    "plain loop": Kind(RightLoop(wrap=by_hand)),
    "plain loop, gradients zeroed, not None": Kind(RightLoop(wrap=by_hand, set_to_none=False)),
    "plain loop, all lines told": Kind(all_told, ("transformers", "peft"), "heavy"),
    "DDP": Kind(RightLoop()),
    "DDP, gradient views, static graph": Kind(
        RightLoop(wrap=ddp_with(gradient_as_bucket_view=True, static_graph=True), clip=0.1)
    ),
    "FSDP2": Kind(clean_peers.sharded),
    "AdamW foreach, clipping": Kind(RightLoop(optimizer=lambda p: adamw(p, foreach=True), clip=1.0)),
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
    "fp16, scaler that skips, rows and losses told": Kind(Told(scaled=True, told={"plan": plan})),
    "warm-up from learning rate 0": Kind(RightLoop(rate=warm_up, told={"schedule": warm_up})),
    "batch norm, dropout, accumulation": Kind(RightLoop(model=Normed, accumulate=4)),
    "batch norm, evaluation on one rank": Kind(RightLoop(model=Normed, optimizer=momentum, evaluate=True)),
    "unused parameters, DDP": Kind(RightLoop(model=WithUnused, wrap=ddp_with(find_unused_parameters=True))),
    "unused parameters, plain loop, allowed": Kind(RightLoop(model=WithUnused, wrap=by_hand, told=UNUSED)),
    "layer drop, DDP": Kind(RightLoop(model=layer_drop, wrap=ddp_with(find_unused_parameters=True))),
    "layer drop, plain loop, SGD": Kind(RightLoop(model=layer_drop, wrap=by_hand, optimizer=sgd)),
    "layer drop alike on all ranks": Kind(RightLoop(model=layer_drop, wrap=by_hand, one_seed=True, accumulate=2)),
    "checkpointed activations, tied weights": Kind(RightLoop(model=tied)),
    "sparse gradients": Kind(RightLoop(model=sparse_embedding, optimizer=sgd)),
    "dropout and batch norm, audited": Kind(Told(model=Normed, told={"reference": loss_sum, "every": 10})),
    "average of weights": Kind(averaged()),
    "two optimizers": Kind(Course(model=Model, optimizer=lambda p: [adamw(p[:2]), momentum(p[2:])])),
    "two optimizers in turn": Kind(clean_communication.alternating),
    "LBFGS": Kind(RightLoop(optimizer=lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=3), closure=True)),
    "resumed in the middle": Kind(clean_communication.resumed),
    "groups clipped apart": Kind(RightLoop(clip=0.05, clip_apart=True, told={"clip": 0.05})),
    "clipped by the largest element": Kind(RightLoop(clip=0.01, clip_order=float("inf"), told={"clip": 0.01})),
    "clipped by the sum of magnitudes": Kind(RightLoop(clip=0.1, clip_order=1.0, told={"clip": 0.1})),
    "rate in a float32 tensor, planned": Kind(
        RightLoop(
            optimizer=lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
            rate=falling,
            told={"schedule": falling},
        )
    ),
    "warm-up from a rate that rounds away": Kind(RightLoop(model=LayerNormed, rate=lambda step: 2e-8 * step)),
    "annealed to a rate that rounds away": Kind(
        RightLoop(model=LayerNormed, rate=lambda step: 1e-2 if step < 8 else 4e-8)
    ),
    "residual branches that begin at 0, warm-up from 0": Kind(
        RightLoop(model=from_zero, optimizer=momentum, rate=lambda step: 1e-5 * (step - 1))
    ),
    "Rprop, a parameter of one element": Kind(
        RightLoop(model=LayerNormed, optimizer=lambda p: torch.optim.Rprop(p, lr=1e-3))
    ),
    "subclass that calls its parent's step": Kind(RightLoop(optimizer=of_a_subclass)),
    "permuted gradients, plain loop": Kind(RightLoop(wrap=permuted)),
    "cache that grows with the rows of a rank": Kind(RightLoop(model=Caching, wrap=by_hand, ragged=True)),
    "rows as arrays": Kind(Told(form=as_array, scored=True, told={"plan": plan})),
    "rows as scalars of others": Kind(Told(form=as_scalars)),
    "rows, resumed in mid-epoch": Kind(Told(start=8)),
    "rows, resumed in mid-epoch, planned": Kind(Told(start=8, told={"plan": plan})),
    "rows, batches left out on purpose": Kind(Told(skips=every_tenth)),
    "every rank scores all rows": Kind(Told(scored=True)),
    "step that reduces and deals out parameters": Kind(inside_step(Dealt)),
    "step that reduces and deals out parameters, clipping": Kind(inside_step(Dealt, clipping)),
    "step that deals out parameters, DDP": Kind(RightLoop(optimizer=dealt_behind)),
    "step that deals out parameters, reduced by hand": Kind(RightLoop(optimizer=dealt_behind, wrap=by_hand)),
    "step that reduces and deals out slices": Kind(inside_step(Sliced)),
    "step that deals out slices, DDP": Kind(RightLoop(optimizer=Sliced)),
    "ZeroRedundancyOptimizer": Kind(RightLoop(optimizer=clean_communication.zero_redundancy)),
    "local SGD": Kind(parting(), suspected=PARTS),
    "local SGD, every update": Kind(parting(every=1), suspected=PARTS),
    "local SGD, through .data": Kind(parting(by="data"), suspected=PARTS),
    "local SGD, copied back": Kind(parting(by="copy", every=7), suspected=PARTS),
    "local SGD, AdamW": Kind(parting(optimizer=adamw), suspected=PARTS),
    "local SGD, no_sync of DDP": Kind(parting(wrapped=True), suspected=PARTS),
    "local SGD behind a reduced warm-up": Kind(parting(warm_up=6, model=LayerNormed), suspected=PARTS),
    "local SGD behind a reduced warm-up, DDP": Kind(parting(warm_up=6, wrapped=True), suspected=PARTS),
    "local SGD inside the optimizer's step": Kind(
        parting(every=10**9, optimizer=lambda p: clean_communication.Averaging(p, lr=1e-2)), suspected=PARTS
    ),
    "PostLocalSGDOptimizer": Kind(clean_communication.post_local, suspected=PARTS),
    "DDP inside a task, with an average": Kind(holding()),
    "DDP inside a task, with an average that has gradients": Kind(holding(frozen=False)),
    "DDP inside a task, average on rank 0": Kind(holding(on=(0,)), suspected=frozenset({"base-frozen"})),
    "DDP inside a task, the inner module watched": Kind(holding(given=lambda task: task.model.module)),
    "two wrapped modules in one, adversaries": Kind(clean_communication.rivals),
    "mean teacher in the model": Kind(taught()),
    "mean teacher in the model, every third update": Kind(taught(every=3)),
    "momentum encoder, moved in the forward pass": Kind(taught(every=0)),
    "momentum encoder, by new data": Kind(taught(every=0, follow=clean_communication.by_new_data)),
    "ReLoRA": Kind(Course(model=Merged, behind=merged)),
    "torch.compile, traced": Kind(
        RightLoop(wrap=lambda model: DistributedDataParallel(torch.compile(model, backend="aot_eager"))), weight="heavy"
    ),
    "torch.compile, to code": Kind(
        RightLoop(wrap=lambda model: torch.compile(DistributedDataParallel(model))), weight="slow"
    ),
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
KINDS["DDP that leaves statistics to the ranks"] = Kind(RightLoop(model=Normed, wrap=ddp_with(broadcast_buffers=False)))


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
