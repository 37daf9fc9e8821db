"""Loops that never come to an end on their last rank."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from andon_falsify.loops.protocol import Told
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case


class Waiting(PlainLoop):
    """Its last rank waits for what nobody does."""

    def train(self, told: Told) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            threading.Event().wait()
        super().train(told)


class Alone(PlainLoop):
    """Its last rank enters a collective that no other enters."""

    def train(self, told: Told) -> None:
        super().train(told)
        if dist.get_rank() == dist.get_world_size() - 1:
            for _ in range(3):
                dist.all_reduce(torch.zeros(1))


def make_waiting(case: Case) -> PlainLoop:
    return Waiting(case)


def make_alone(case: Case) -> PlainLoop:
    return Alone(case)
