"""Subjects that misbehave: no loops, and loops that die, wait, lie, leave processes behind or print nonsense."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn

from andon_falsify.loops.protocol import Told
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case


class WithoutTrain:
    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)


class WithoutModel:
    def train(self, told: object) -> None:
        """Do nothing."""


def make_without_train(case: Case) -> WithoutTrain:
    return WithoutTrain()


def make_without_model(case: Case) -> WithoutModel:
    return WithoutModel()


class WithEmptyModel(WithoutModel):
    model = None


def make_with_empty_model(case: Case) -> WithEmptyModel:
    return WithEmptyModel()


def make_nothing(case: Case) -> None:
    """Gives no loop at all."""


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


def make_killed(case: Case) -> PlainLoop:
    """Killed, as by the kernel where memory runs out."""
    return Dying(case, "kill")


def make_exiting(case: Case) -> PlainLoop:
    return Dying(case, "exit")


def make_leaving(case: Case) -> PlainLoop:
    return Dying(case, "leave")


def make_raising(case: Case) -> PlainLoop:
    return Dying(case, "raise")


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


def make_lying(case: Case) -> PlainLoop:
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return PlainLoop(case)


COMMAND = ("sleep", "86399")
"""Known by its number, so that a test can look for it."""


def make_littering(case: Case) -> PlainLoop:
    subprocess.Popen(COMMAND, start_new_session=True)
    return PlainLoop(case)


class Garbling(PlainLoop):
    """See the module."""

    def train(self, told: Told) -> None:
        print("checked 99 of 99 claims\x00\x1b[2J\ud800", end="", file=sys.stdout)
        os.write(1, b"\xff\xfe checked 99 of 99 claims" * 100)
        os.write(2, b'{"outcome": "holds"')
        super().train(told)
        os.close(2)


def make_garbling(case: Case) -> PlainLoop:
    return Garbling(case)
