"""What torchrun would have said to a rank: libraries find their place in the world in these variables."""

from __future__ import annotations

import os

import torch.distributed as dist


def as_launched() -> None:
    """Set the variables of torchrun for the process group that this process belongs to already.

    Libraries join a group that is there, so address and port are never used; they only have to be set.
    """
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="andon")
