"""FSDP2, watched by one line: torchrun --nproc-per-node 2 examples/watch/fsdp2.py

On a mesh of one dimension no shard has a replica: what compares replicas is not applicable. On a mesh with a replicate
dimension the shards are compared along it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import andon


def main() -> None:
    """Eight updates."""
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    w = andon.watch(model, optimizer)  # the one line
    for step in range(8):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * world + rank))
        nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    w.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
