"""Ranks that fail, dawdle or never come, and worlds that are not the one that was asked for."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from andon_falsify.nemesis.planting import GUARDS, PLANTS, Planted
from andon_falsify.nemesis.protocol import Launch, Nemesis, Plant, Promise, Struck
from andon_falsify.nemesis.run import TIMEOUT_S, Run


@dataclass(frozen=True, kw_only=True)
class SmallerWorld(Nemesis):
    """torchrun starts two ranks where three were asked for."""

    before_start: bool = True

    def launch(self, *, guarded: bool) -> Launch:
        """Two ranks by torchrun; `--workers 3` is what asks for three."""
        return Launch("3")

    def calm(self) -> Launch:
        """The three that were asked for."""
        return self.heal(guarded=True)

    def heal(self, *, guarded: bool) -> Launch:
        """The three that were asked for."""
        return Launch("3", environment=(("ANDON_WORLD", "3"),))

    def start(self, run: Run, launch: Launch) -> None:
        """torchrun in both phases, with as many ranks as the launch's environment says; two by default."""
        ranks = dict(launch.environment).get("ANDON_WORLD", "2")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        # The ranks speak where torchrun does not: its own traceback says nothing of them.
        speaking = ["--no-python", "sh", "-c", 'exec "$@" 2>&1', "sh", sys.executable]
        apart = ["sh", "-c", 'exec "$@" 2>"$0"', str(run.scratch / "torchrun")]
        run.spawn([*apart, *torchrun, *speaking, *run.arguments(launch)], launch)

    def inject(self, run: Run) -> Struck:
        """The world is smaller from the start."""
        return Struck(time.monotonic(), 0, "torchrun --nproc-per-node 2 with --workers 3")


NEMESES: tuple[Nemesis, ...] = (
    Planted(
        name="rank raises",
        numbers=(7,),
        how="RuntimeError on rank 1 of 3 in update 7",
        promise=Promise((1,), ("rank 1 of 3: RuntimeError: planted",), 2.0),
        plant=Plant.of(f"{PLANTS}:raises", rank=1, step=7),
        workers="3",
        guard="reports of ranks",
        finds="not said: 'rank 1 of 3: RuntimeError: planted'",
        off=(Plant(f"{GUARDS}:no_reports"),),
    ),
    Planted(
        name="slow rank",
        numbers=(10,),
        how=f"rank 1 sleeps 3 s in update 7, run.timeout_s={TIMEOUT_S:g}",
        promise=Promise((0,)),
        plant=Plant.of(f"{PLANTS}:sleeps", rank=1, step=7, seconds=3.0),
        guard="a timeout above the sleep",
        finds="exit 72 instead of 0",
        off_settings=("run.timeout_s=1.5",),
    ),
    Planted(
        name="rank never joins",
        numbers=(16,),
        how=f"rank 1 of 3 is started and does not connect, run.timeout_s={TIMEOUT_S:g}",
        promise=Promise((72,), ("rank 1",), TIMEOUT_S + 4.0, at_once=True),
        plant=Plant.of(f"{PLANTS}:never_joins", rank=1),
        workers="3",
        guard="run.timeout_s",
        finds="not over",
        off_settings=("run.timeout_s=600",),
    ),
    SmallerWorld(
        name="world smaller than asked for",
        numbers=(16, 41),
        how="torchrun --nproc-per-node 2 with --workers 3",
        promise=Promise((1,), ("3 were asked for, torchrun started 2",), 30.0, at_once=True),
        no_guard="one comparison before anything else; without --workers torchrun decides",
    ),
)
