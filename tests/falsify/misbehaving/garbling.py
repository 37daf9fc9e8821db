"""A right loop that writes nonsense to its standard streams, without an end of line, and closes one of them."""

from __future__ import annotations

import os
import sys

from andon_falsify.loops.protocol import Told
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case


class Garbling(PlainLoop):
    """See the module."""

    def train(self, told: Told) -> None:
        print("checked 99 of 99 claims\x00\x1b[2J\ud800", end="", file=sys.stdout)
        os.write(1, b"\xff\xfe checked 99 of 99 claims" * 100)
        os.write(2, b'{"outcome": "holds"')
        super().train(told)
        os.close(2)


def make(case: Case) -> PlainLoop:
    return Garbling(case)
