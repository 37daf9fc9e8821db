"""Subjects that misbehave: no loops, and loops that die, wait, lie, leave processes behind or print nonsense."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from andon_falsify.loops.protocol import Told
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case


class WithoutTrain:
    def __init__(self, case: Case) -> None:
        self.model = nn.Linear(1, 1)


class WithoutModel:
    def __init__(self, case: Case) -> None:
        pass

    def train(self, told: object) -> None:
        pass


class WithEmptyModel(WithoutModel):
    model = None


def nothing(case: Case) -> None:
    pass


not_a_function = 3


class Dying(PlainLoop):
    """Its last rank ends in `how`, before the first update."""

    def __init__(self, case: Case, how: str) -> None:
        super().__init__(case)
        self.how = how

    def train(self, told: Told) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exit":
                os._exit(7)
            if self.how == "leave":
                sys.exit("enough")
            raise ArithmeticError("nothing adds up")
        super().train(told)


killed, exiting, leaving, raising = (partial(Dying, how=how) for how in ("kill", "exit", "leave", "raise"))


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


def lying(case: Case) -> PlainLoop:
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return PlainLoop(case)


COMMAND = ("sleep", "86399")
"""Known by its number, so that a test can look for it."""


def littering(case: Case) -> PlainLoop:
    subprocess.Popen(COMMAND, start_new_session=True)
    return PlainLoop(case)


class Garbling(PlainLoop):
    def train(self, told: Told) -> None:
        print("checked 99 of 99 claims\x00\x1b[2J\ud800", end="", file=sys.stdout)
        os.write(1, b"\xff\xfe checked 99 of 99 claims" * 100)
        os.write(2, b'{"outcome": "holds"')
        super().train(told)
        os.close(2)
