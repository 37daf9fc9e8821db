"""Every kind of right loop, by name: what 1,000 steps of each must not make a watch say anything about."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from tests.watch import clean_peers, clean_rows, clean_state
from tests.watch.clean import Kind, Seen
from tests.watch.clean_loops import (
    RightLoop,
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
    warm_up,
)
from tests.watch.clean_models import (
    Caching,
    Checkpointed,
    LayerDrop,
    LayerNormed,
    Normed,
    SparseEmbedding,
    WithUnused,
)
from tests.watch.watched import all_told

UNUSED = {"allow": {"gradient-present": "the layer is there for another task"}}

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
    "torch.compile, traced": Kind(RightLoop(wrap=compiled), weight="heavy"),
    "torch.compile, to code": Kind(RightLoop(wrap=compiled_to_code), weight="slow"),
    "Accelerate": Kind(clean_peers.accelerated, ("accelerate",), "heavy"),
    "Lightning Fabric": Kind(clean_peers.fabric, ("lightning",), "heavy"),
    "Trainer of transformers": Kind(clean_peers.transformers_trainer, ("transformers", "accelerate"), "heavy"),
}


def installed(kind: Kind) -> bool:
    """Whether this machine has what the loop uses."""
    return all(importlib.util.find_spec(name) is not None for name in kind.needs)


def run_kinds(names: Sequence[str], steps: int) -> dict[str, Seen]:
    """What a watch saw on this rank of each kind, of so many steps."""
    return {name: KINDS[name].run(steps) for name in names}
