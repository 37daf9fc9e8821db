"""A loop that trains in a group of its own and says that it is all there is."""

from __future__ import annotations

import torch.distributed as dist

from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case


def make(case: Case) -> PlainLoop:
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return PlainLoop(case)
