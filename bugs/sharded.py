"""Ranks that should train one model and do not: sharding, wrappers, rates and clipping."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bugs.bench import Job, Lines, case
from bugs.rows import data, ids, plain


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def train(job: Job, model: nn.Module, opt: torch.optim.Optimizer, w: Lines, by_hand: bool = False) -> None:
    """One epoch. by_hand: average the gradients of plain tensors over the ranks."""
    for inputs, labels in plain(job):
        w.batch(ids(inputs))
        cross_entropy(model(inputs), labels).backward()
        for each in model.parameters():
            if by_hand and type(each) is nn.Parameter and each.grad is not None:
                dist.all_reduce(each.grad)
                each.grad /= job.world
        opt.step()
        opt.zero_grad()
    w.close()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


@case("memory-kept", "pytorch/examples FSDP2/model.py", 0, 2, found="finding")
def memory_kept(job: Job) -> object:
    """The model is made on the meta device, and after `to_empty` only its own parameters are reset, not those of its
    layers, which keep what was in memory."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

        def reset_parameters(self) -> None:
            nn.init.ones_(self.scale)
            if job.right:
                self.layer.reset_parameters()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layer(inputs * self.scale)  # type: ignore[no-any-return]

    torch.use_deterministic_algorithms(True)  # fills new memory with NaN, so that the case is the same every time
    with torch.device("meta"):
        model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (job.world,)))
    model.to_empty(device="cpu")
    model.reset_parameters()
    torch.use_deterministic_algorithms(False)
    bad = sum(bool(each.full_tensor().isnan().any()) for each in model.parameters())  # type: ignore[attr-defined]
    opt = sgd(model)
    train(job, model, opt, job.watch(model, opt))
    return bad


@case("not-wrapped", "pytorch/examples imagenet/main.py", True, False, found="finding")
def not_wrapped(job: Job) -> object:
    """Without an accelerator no wrapper is put around the model, so that each rank trains its own."""
    net = mlp()
    model = DistributedDataParallel(net) if job.right else net
    opt = sgd(model)
    train(job, model, opt, job.watch(model, opt))
    return job.same(net.get_parameter("0.weight"))


@case("no-replica-group", "verl-project/verl#7493", True, False)
def no_replica_group(job: Job) -> object:
    """Shards of size 1 make a mesh in which each rank is its own group, and nothing is reduced between the groups."""
    mesh = init_device_mesh("cpu", (job.world, 1), mesh_dim_names=("replicate", "shard"))
    model = mlp()
    fully_shard(model, mesh=mesh if job.right else mesh["shard"])
    opt = sgd(model)
    train(job, model, opt, job.watch(model, opt))
    return job.same(model.get_parameter("0.weight").to_local())  # type: ignore[attr-defined]


class Lora(nn.Module):
    """A layer and a low-rank adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer and its adapter."""
        return self.base(inputs) + self.up(self.down(inputs))  # type: ignore[no-any-return]


@case("adapter-beside-shards", "huggingface/transformers#48792", True, False)
def adapter_beside_shards(job: Job) -> object:
    """An adapter that is added after `fully_shard` is a plain tensor, drawn on each rank and reduced on none: the ranks
    train different adapters, and that of rank 0 is saved."""
    base = nn.Linear(4, 3)
    fully_shard(base, mesh=init_device_mesh("cpu", (job.world,)))
    torch.manual_seed(0 if job.right else job.rank)
    model = Lora(base)
    opt = sgd(model)
    train(job, model, opt, job.watch(model, opt), by_hand=job.right)
    return job.same(model.up.weight)


@case("adapter-drawn-by-rank", "NVIDIA-NeMo/Megatron-Bridge#5396", 0, 8)
def adapter_drawn_by_rank(job: Job) -> object:
    """Adapters that all ranks share are drawn from a stream that depends on the rank. Their gradients are summed, so
    that the difference stays as it is."""
    model = Lora(nn.Linear(4, 3).requires_grad_(False))
    torch.manual_seed(0 if job.right else job.rank)
    nn.init.normal_(model.down.weight)
    apart = [torch.empty_like(model.down.weight) for _ in range(job.world)]
    dist.all_gather(apart, model.down.weight.detach())
    opt = sgd(model)
    train(job, model, opt, job.watch(model, opt), by_hand=True)
    return int((apart[0] != apart[-1]).sum())


@case("schedule-of-one-node", "Spijkervet/SimCLR main.py", 0.05, 0.1, found="finding")
def schedule_of_one_node(job: Job) -> object:
    """Only the first node steps the scheduler, so that the learning rates differ between nodes."""
    model = DistributedDataParallel(mlp())
    opt = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    w = job.watch(model, opt, schedule=lambda update: 0.1 * 0.5 ** ((update - 1) // 2))
    for inputs, labels in plain(job):
        w.batch(ids(inputs))
        cross_entropy(model(inputs), labels).backward()
        opt.step()
        opt.zero_grad()
        if job.right or job.rank == 0:
            schedule.step()
        job.log("rate", opt.param_groups[0]["lr"])
    w.close()
    return [rate for _, rate in job.logged("rate")][-3]


@case("clipped-while-scaled", "pytorch/examples#1196", 1.0, 1 / 256, found="finding")
def clipped_while_scaled(job: Job) -> object:
    """Gradients are clipped while they still have the loss scale, so that the update is smaller by that scale."""
    net = mlp()
    model, scaler = DistributedDataParallel(net), torch.amp.GradScaler("cpu", init_scale=256.0)
    opt = sgd(model)
    w, result = job.watch(model, opt, scaler=scaler, clip=0.01), 0.0
    for inputs, labels in plain(job, data()):
        w.batch(ids(inputs))
        before = [each.detach().clone() for each in net.parameters()]
        scaler.scale(cross_entropy(model(inputs), labels)).backward()
        if job.right:
            scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        moved = torch.cat([(old - new.detach()).flatten() for old, new in zip(before, net.parameters(), strict=True)])
        result = result or float(moved.norm() / 0.1 / 0.01)
    w.close()
    return result
