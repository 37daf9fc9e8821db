"""Plays a nemesis in real runs of `andon train`: fault, heal, control without fault, control without guard."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import disk, inside, judging, network, rows, signals
from .language import Nemesis, Phase, Row, Tier
from .left_behind import Undisturbed
from .planting import Struck, idle
from .run import LIMIT_S, SLACK_S, UPDATES, ClosingError, Launch, NotStruckError, Run, row_lines

UNPLAYED: Mapping[int, str] = {
    19: "no run meets an old one: keys of a store carry an identity of their own, and ports are the kernel's choice",
}
"""Rows of the catalogue (reliability, issue 5) without a nemesis, and the reason."""


def nemeses(tier: Tier = "minutes", only: Sequence[str] = ()) -> tuple[Nemesis, ...]:
    """The nemeses of a tier (minutes: all), or those with one of `only` in their names. Raises `ValueError` if none."""
    found = [each for module in (signals, inside, rows, disk, network) for each in module.NEMESES]
    if only:
        chosen = [each for each in found if any(part in each.name for part in only)]
    else:
        chosen = [each for each in found if tier == "minutes" or each.tier == "seconds"]
    if not chosen:
        raise ValueError(f"no nemesis is called {' or '.join(only)}; there are: {', '.join(n.name for n in found)}")
    return tuple(chosen)


@dataclass
class Bench:
    """The rows and the undisturbed run, which all nemeses share."""

    base: Path
    whole: Undisturbed
    rows: Path
    held: Path
    seed: int
    closing: threading.Event = field(default_factory=threading.Event)
    _calm: dict[object, tuple[str, ...]] = field(default_factory=dict)
    _runs: list[Run] = field(default_factory=list)

    @classmethod
    def prepare(cls, base: Path, seed: int = 1, settings: Sequence[str] = ()) -> Bench:
        """Write the rows and train undisturbed. Raises `RuntimeError` if that fails."""
        rows, held = base / "rows.jsonl", base / "held.jsonl"
        for path, count in ((rows, 96), (held, 12)):
            path.write_bytes(b"".join(row_lines(path.name, count)))
        bench = cls(base, Undisturbed(base / "whole"), rows, held, seed)
        run = Run(base, base / "whole", rows, held, bench.whole, random.Random(seed))
        try:
            run.start(Launch(settings=("training.checkpoint_every=1", *settings)))
            ending = run.end()
        finally:
            run.kill()
        if ending.codes != (0,):
            raise RuntimeError(f"the undisturbed run ended with {ending.codes}: {ending.said[-2000:]}")
        if lacking := bench.whole.lacking(UPDATES):
            raise RuntimeError(f"nothing can be held against the undisturbed run: {lacking}")
        return bench

    def play(self, nemesis: Nemesis) -> Row:
        """Play a nemesis with both of its controls, and judge it."""
        if self.closing.is_set():
            return Row(nemesis, unplayed="not begun")
        try:
            reason = nemesis.needs()
            if reason is not None:
                return Row(nemesis, skipped=reason)
            phases = self.disturbed(nemesis)
            calm = self._control(nemesis)
        except ClosingError as error:
            return Row(nemesis, unplayed=f"not played to its end: {error}")
        except NotStruckError as error:
            return Row(nemesis, failed=f"the fault did not happen: {error}")
        except Exception as error:  # noqa: BLE001 - a broken nemesis must not lose the rows of the others
            return Row(nemesis, failed=f"the nemesis failed: {type(error).__name__}: {error}")
        wrong, *unguarded = (judging.wrong(nemesis.promise, phase) for phase in phases)
        row = Row(nemesis, phase=phases[0], wrong=wrong, calm=calm)
        if not unguarded:
            return row
        finds = "" if nemesis.guard is None else nemesis.guard.finds
        return replace(row, unguarded=unguarded[0], doubt=judging.doubt(phases[1], unguarded[0], finds))

    def disturbed(self, nemesis: Nemesis) -> list[Phase]:
        """The disturbed run, and the one without the guard if there is a guard."""
        return [self._phase(nemesis, guarded=guarded) for guarded in ((True, False) if nemesis.guard else (True,))]

    def _phase(self, nemesis: Nemesis, *, guarded: bool) -> Phase:
        with self._opened("guarded" if guarded else "unguarded", nemesis) as run:
            phase = self._fault(nemesis, run, guarded=guarded)
            if not guarded and judging.wrong_before_healing(nemesis.promise, phase):
                return phase  # without its guard it is already wrong, so resuming would add nothing
            launch = nemesis.heal(guarded=guarded)
            nemesis.place.start(run, launch)
            healing, unmoved = run.end(), (*phase.idle, *idle(launch.plants, run.scratch))
            return replace(phase, healing=healing, result=run.whole.differs(run.folder), idle=unmoved)

    def _fault(self, nemesis: Nemesis, run: Run, *, guarded: bool) -> Phase:
        launch = nemesis.launch(guarded=guarded)
        try:
            strikes = [fault.strike(run) for fault in nemesis.faults if fault.before_start]
            nemesis.place.start(run, launch)
            strikes += [fault.strike(run) for fault in nemesis.faults if not fault.before_start]
            # Time bounds count from the last fault, acceptance from the first.
            at, step = max(each.at for each in strikes), min(each.step for each in strikes)
            struck = Struck(at, step, "; ".join(each.proof for each in strikes))
            ending = run.end(min(nemesis.promise.within_s + SLACK_S, LIMIT_S), struck.at)
        finally:
            run.kill()
            for fault in reversed(nemesis.faults):
                fault.heal(run)
        newer, other = run.whole.accepted(run.folder, struck.step)
        off = [] if guarded else [each for each in launch.plants if each not in nemesis.launch(guarded=True).plants]
        return Phase(struck, ending, newer, other, idle=idle(off, run.scratch))

    def _control(self, nemesis: Nemesis) -> tuple[str, ...]:
        """The same run without faults, played once for all nemeses with the same place and launch."""
        key = nemesis.place, nemesis.calm()
        if key not in self._calm:
            with self._opened("calm", nemesis) as run:
                nemesis.place.start(run, nemesis.calm())
                self._calm[key] = judging.not_calm(run.end(), run.whole.differs(run.folder))
        return self._calm[key]

    @contextmanager
    def _opened(self, what: str, nemesis: Nemesis) -> Iterator[Run]:
        """A run in the place of a nemesis. Kills its processes at the end, then releases the place."""
        run = self.open(what, f"{nemesis.name} {self.seed}")
        with nemesis.place.taken(run):
            try:
                yield run
            finally:
                run.kill()

    def open(self, what: str, draw: str) -> Run:
        """A run in a new folder, not started yet. draw: the seed of its random choices."""
        scratch = Path(tempfile.mkdtemp(prefix=f"{what}-", dir=self.base))
        run = Run(scratch, scratch / "run", self.rows, self.held, self.whole, random.Random(draw), self.closing)
        self._runs.append(run)
        return run

    def close(self) -> None:
        """End all runs from another thread. The threads that play them undo their faults."""
        self.closing.set()
        for run in self._runs:
            run.kill()
