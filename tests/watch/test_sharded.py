"""The faults that one line sees on replicas, planted in a loop under `fully_shard`; and what it does not see there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import utils
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, TensorDataset

import andon
from tests.watch.small import answers

ROWS, CLIP = 24, 0.05
Found = list[tuple[str, int]]


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def frozen() -> nn.Module:
    return nn.Linear(16, 16).requires_grad_(False)


class Loop:
    """Right: sharded layers and a whole one that was put in later, whose gradient the loop reduces itself.

    Two micro-batches make an update, and three updates an epoch. A fault replaces some of the methods. Faults that
    sharding does not touch are planted on replicas, and one of each clause here.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(5, 16), nn.Dropout(0.1), frozen(), nn.Tanh(), nn.Linear(16, 24), nn.Linear(24, 3)
        self.model: Any = nn.Sequential(*layers)
        self.early = list(self.model.parameters())
        self.rows = TensorDataset(torch.randn(ROWS, 5), torch.arange(ROWS) % 3)
        self.rank, self.done = dist.get_rank(), 0
        self.shard()
        self.adapt()
        self.optimizer = torch.optim.AdamW(self.optimized(), lr=1e-2)

    def shard(self, mesh: Any = None) -> None:
        for layer in (self.model[0], self.model[2], self.model[4], self.model):
            fully_shard(layer, mesh=mesh or init_device_mesh("cpu", (2,)))

    def adapt(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model[3] = nn.Linear(16, 16)

    def optimized(self) -> list[Any]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def parts(self) -> tuple[list[Any], list[Any]]:
        """The sharded and the whole parameters that have a gradient."""
        present = [p for p in self.optimized() if p.grad is not None]
        shards = [p for p in present if hasattr(p, "to_local")]
        return shards, [p for p in present if not hasattr(p, "to_local")]

    def sampler(self) -> Any:
        return DistributedSampler(self.rows, num_replicas=2, rank=self.rank, seed=3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.model(x), y) / 2

    def reduce(self) -> None:
        for p in self.parts()[1]:
            dist.all_reduce(p.grad)
            p.grad /= 2

    def clip(self) -> None:
        norms = [utils.get_total_norm(p.grad for p in part) for part in self.parts() if part]
        whole = torch.stack([n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]).norm()
        for part in self.parts():
            utils.clip_grads_with_norm_(part, CLIP, whole)

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def between(self) -> None:
        """What happens after an update."""

    def train(self) -> Found:
        found: Found = []
        w = andon.watch(self.model, self.optimizer, action=lambda each: found.append((each.clause, each.step)))
        sampler = self.sampler()
        loader: Any = DataLoader(self.rows, batch_size=2, sampler=sampler)
        for number in range(7):
            if number % 3 == 0:
                getattr(sampler, "set_epoch", int)(number // 3)
                batches = iter(loader)
            for _ in range(2):
                self.loss(*next(batches)).backward()  # type: ignore[no-untyped-call]
            self.reduce()
            self.clip()
            self.optimizer.step()
            self.zero()
            self.done += 1
            self.between()
        w.close()
        return found


def planted(**methods: Callable[..., object]) -> type[Loop]:
    return type("Loop", (Loop,), methods)


def after(method: str, what: Callable[[Any], object], done: int | None = 2) -> type[Loop]:
    """what(loop) follows `method`, if `done` updates are made; None: always."""

    def act(loop: Any, *given: Any) -> Any:
        out = getattr(Loop, method)(loop, *given)
        if done in (None, loop.done):
            what(loop)
        return out

    return planted(**{method: act})


def by_local_norm(loop: Loop) -> None:
    shards, _ = loop.parts()
    utils.clip_grads_with_norm_(shards, CLIP, utils.get_total_norm([local(p.grad) for p in shards]))


def by_hand(loop: Loop) -> None:
    gradients = [local(p.grad) for p in loop.parts()[0]]
    norm = torch.stack([each.norm() for each in gradients]).norm()
    for each in gradients:
        each.mul_(min(1.0, CLIP / 10 / float(norm)))


def poisoned(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    return Loop.loss(loop, x, y) * (float("nan") if (loop.done, loop.rank) == (2, 1) else 1.0)


def nan_hidden(loop: Loop) -> None:
    Loop.reduce(loop)
    for p in loop.optimized():
        local(p.grad).nan_to_num_(0.0, 0.0, 0.0)


def reversed_on_one(loop: Loop) -> None:
    for p in loop.parts()[1][:: -1 if loop.rank else 1]:
        dist.all_reduce(p.grad.flatten()[:16])


def forward_first(loop: Loop) -> None:
    """The root has parameters of its own, which stay whole after a forward pass without a backward pass."""
    Loop.shard(loop)
    with torch.no_grad():
        loop.model(torch.ones(2, 5))


class Half(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


def with_half(loop: Loop) -> None:
    loop.model[4] = Half(16, 24, dtype=torch.bfloat16)
    Loop.shard(loop)


def small_rate(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    loop.optimizer.param_groups[0]["lr"] = 2e-8
    return Loop.loss(loop, x, y)


def scaled(loop: Any, x: Tensor, y: Tensor) -> Tensor:
    loop.scaler = getattr(loop, "scaler", None) or torch.amp.GradScaler("cpu", init_scale=8.0)
    return loop.scaler.scale(Loop.loss(loop, x, y))  # type: ignore[no-any-return]


def clip_scaled(loop: Any) -> None:
    Loop.clip(loop)
    loop.scaler.unscale_(loop.optimizer)
    loop.scaler.update()


def average(loop: Any, rank: int | None = None) -> None:
    loop.average = getattr(loop, "average", None) or [p.detach().clone() for p in loop.optimized()]
    if rank in (None, loop.rank):
        torch._foreach_lerp_(loop.average, [p.detach() for p in loop.optimized()], 0.1)


@torch.no_grad()
def touched(loop: Loop) -> None:
    loop.model[2].weight.add_(1e-3)


def of_rank(change: Callable[[Any], Any]) -> Callable[[Loop], object]:
    return lambda loop: change(loop) if loop.rank else None


FAULTS: dict[str, tuple[type[Loop], str, int]] = {
    "F01 adapters drawn by each rank": (planted(adapt=lambda loop: Loop.adapt(loop, loop.rank)), "replicas-agree", 0),
    "F02 nothing reduced": (
        after("adapt", lambda loop: loop.model.set_requires_gradient_sync(False), None), "gradient-present", 2),
    "F02 a mesh for each rank": (planted(shard=lambda loop: Loop.shard(loop, init_device_mesh(
        "cpu", (2, 1), mesh_dim_names=("own", "shard"))["shard"])), "replicas-agree", 1),
    "F05 adapters put in after sharding": (planted(reduce=lambda loop: None), "replicas-agree", 1),
    "F05 module put in while training": (
        after("between", lambda loop: loop.model[0].add_module("more", frozen())), "parameters-kept", 3),
    "F04 layers that are not sharded": (planted(reduce=lambda loop: None, shard=lambda loop: [
        fully_shard(each, mesh=init_device_mesh("cpu", (2,))) for each in loop.model[:3:2]]), "replicas-agree", 1),
    "F08 head replaced after sharding": (planted(
        adapt=lambda loop: setattr(loop.model, "5", nn.Linear(24, 3)), reduce=lambda loop: None), "replicas-agree", 1),
    "F13 moment of one rank": (after("between", of_rank(
        lambda loop: local(loop.optimizer.state[loop.model[0].weight]["exp_avg"])[0, 0].add_(1))),
                               "optimizers-agree", 3),
    "F83 only one rank loads": (after("between", of_rank(
        lambda loop: loop.model[0].load_state_dict({"weight": loop.model[0].weight * 2}, strict=False))),
                                "replicas-agree", 3),
    "F89 shard of one rank changed": (after("between", of_rank(torch.no_grad()(
        lambda loop: local(loop.model[0].weight)[0, 0].mul_(1 + 2.0**-10)))), "replicas-agree", 3),
    "F91 gradient of one rank": (after("reduce", of_rank(
        lambda loop: local(loop.model[0].weight.grad)[0, 0].add_(0.5))), "gradients-agree", 3),
    "F89 average on one rank": (planted(adapt=lambda _: None, between=lambda own: average(own, 1)), "copies-agree", 2),
    "F23 reduction of a temporary": (
        planted(reduce=lambda loop: [dist.all_reduce(p.grad * 1) for p in loop.parts()[1]]), "gradients-agree", 1),
    "F25 another order on one rank": (planted(reduce=reversed_on_one), "collectives-agree", 1),
    "F31 zero_grad missing": (planted(zero=lambda loop: None), "gradient-fresh", 2),
    "F38 clipped by the norm of a shard": (planted(clip=by_local_norm), "clip-placed", 1),
    "F38 clipped by hand by the norm of a shard": (planted(clip=by_hand), "clip-placed", 1),
    "F40 overflow": (after("reduce", lambda loop: loop.parts()[1][0].grad.mul_(1e30)), "finite", 3),
    "F41 NaN hidden by nan_to_num": (planted(loss=poisoned, reduce=nan_hidden), "finite", 3),
    "F43 loss scale of one rank": (after("clip", of_rank(
        lambda loop: [local(p.grad).mul_(2) for p in loop.optimized()])), "gradients-agree", 3),
    "F44 16-bit layer": (planted(shard=with_half), "precision-sufficient", 0),
    "F44 updates of a 16-bit layer rounded away": (planted(shard=with_half, loss=small_rate), "update-applied", 1),
    "F38 clip before unscale": (planted(adapt=lambda loop: None, loss=scaled, clip=clip_scaled), "clip-placed", 1),
    "F50 loader not dealt out": (planted(sampler=lambda loop: SequentialSampler(loop.rows)), "samples-once", 1),
    "F58 training in evaluation mode": (after("between", lambda loop: loop.model.eval(), 1), "training-mode", 3),
    "F62 optimizer made before sharding": (planted(
        optimized=lambda loop: loop.early, adapt=lambda loop: None, clip=lambda loop: None), "parameters-kept", 0),
    "F62 forward pass before the optimizer": (planted(shard=forward_first, adapt=lambda _: None),
                                              "parameters-kept", 0),
    "F67 layer gets no gradient": (after("adapt", lambda loop: loop.model[0].register_forward_hook(
        lambda _, __, out: out.detach()), None), "gradient-present", 2),
    "F68 base touched": (after("between", touched, None), "base-frozen", 2),
}  # fmt: skip
SILENT = {
    "right": Loop,
    "averaged": planted(adapt=lambda _: None, between=average),
    "whole last": planted(adapt=lambda loop: loop.model.append(nn.Linear(3, 3))),
    # No other rank holds the same shard, and torch does not count this write.
    "F89 bit flip in a shard": after("between", of_rank(
        lambda loop: local(loop.model[0].weight).data.view(torch.int32).bitwise_xor_(1 << 12))),
}  # fmt: skip
DEFAULT = ("F01 adapters drawn by each rank", "F31 zero_grad missing", "F38 clipped by hand by the norm of a shard",
           "F13 moment of one rank", "F41 NaN hidden by nan_to_num", "F62 forward pass before the optimizer",
           "F89 average on one rank", "F89 shard of one rank changed", "F91 gradient of one rank", "right",
           "whole last")  # fmt: skip
"""The right loop, and one fault of each mechanism that replicas do not have. The others are deep."""


def trained(name: str) -> Found:
    return (SILENT.get(name) or FAULTS[name][0])().train()


def _chosen(names: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.deep) for name in names]


@pytest.mark.parametrize("name", _chosen(FAULTS))
def test_a_fault_in_a_sharded_loop_is_found_by_its_clause(name: str) -> None:
    one, other = answers(2, trained, name)
    assert FAULTS[name][1:] in one
    assert one == other


@pytest.mark.parametrize("name", _chosen(SILENT))
def test_the_right_sharded_loop_is_silent_and_so_is_what_no_rank_can_compare(name: str) -> None:
    assert answers(2, trained, name) == [[], []]
