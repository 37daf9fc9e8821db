"""Plays a nemesis against real runs of `andon train`: fault, heal, control without fault, control without guard."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import judging
from .language import Nemesis, Phase, Row
from .left_behind import Undisturbed
from .planting import Struck, idle
from .run import LIMIT_S, SLACK_S, UPDATES, ClosingError, Launch, NotStruckError, Run, row_lines


@dataclass
class Bench:
    """What all nemeses share: the rows, and the run that nobody disturbed. Prepared once in a folder."""

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
        """Write the rows, and train once undisturbed. Raises `RuntimeError` where that fails."""
        rows, held = base / "rows.jsonl", base / "held.jsonl"
        for path, count in ((rows, 96), (held, 12)):
            path.write_bytes(b"".join(row_lines(path.name, count)))
        bench = cls(base, Undisturbed(base / "whole"), rows, held, seed)
        run = Run(base, base / "whole", rows, held, bench.whole, random.Random(seed))
        launch = Launch(settings=("training.checkpoint_every=1", *settings))
        try:
            run.spawn(run.command(launch), launch)
            ending = run.end(LIMIT_S, time.monotonic())
        finally:
            run.kill()
        if ending.codes != (0,):
            raise RuntimeError(f"the undisturbed run ended with {ending.codes}: {ending.said[-2000:]}")
        if lacking := bench.whole.lacking(UPDATES):
            raise RuntimeError(f"nothing can be held against the undisturbed run: {lacking}")
        return bench

    def play(self, nemesis: Nemesis) -> Row:
        """Both phases and both controls of a nemesis, judged."""
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
        except Exception as error:  # noqa: BLE001 - one that is broken itself must not take the others' rows along
            return Row(nemesis, failed=f"the nemesis failed: {type(error).__name__}: {error}")
        wrong, *unguarded = (judging.wrong(nemesis.promise, phase) for phase in phases)
        row = Row(nemesis, phase=phases[0], wrong=wrong, calm=calm)
        if not unguarded:
            return row
        finds = "" if nemesis.guard is None else nemesis.guard.finds
        return replace(row, unguarded=unguarded[0], doubt=judging.doubt(phases[1], unguarded[0], finds))

    def disturbed(self, nemesis: Nemesis) -> list[Phase]:
        """The disturbed run, and where there is a guard to switch off, the one without it."""
        if nemesis.guard is not None and nemesis.launch(guarded=True) == nemesis.launch(guarded=False):
            return self._phases(nemesis, guarded=True, heals=(True, False))
        return [
            phase
            for guarded in (True, False)
            if guarded or nemesis.guard is not None
            for phase in self._phases(nemesis, guarded=guarded, heals=(guarded,))
        ]

    def _phases(self, nemesis: Nemesis, *, guarded: bool, heals: Sequence[bool]) -> list[Phase]:
        """One disturbed run, healed once for each of `heals` (with its guard, without), each from the same folder."""
        with self._opened("guarded" if guarded else "unguarded", nemesis) as run:
            phase = self._fault(nemesis, run, guarded=guarded)
            if not nemesis.promise.heals or (not guarded and judging.wrong_before_healing(nemesis.promise, phase)):
                return [phase]  # without its guard it is found wrong already, and needs no second look
            kept = run.folder.with_name(f"{run.folder.name}-kept")
            found = []
            for number, each in enumerate(heals, start=1):
                if number < len(heals):
                    shutil.copytree(run.folder, kept, symlinks=True)
                found.append(self._healed(nemesis, run, phase, guarded=each))
                if number < len(heals):
                    shutil.rmtree(run.folder)
                    shutil.copytree(kept, run.folder, symlinks=True)
            return found

    def _fault(self, nemesis: Nemesis, run: Run, *, guarded: bool) -> Phase:
        launch = nemesis.launch(guarded=guarded)
        try:
            strikes = [fault.strike(run) for fault in nemesis.faults if fault.before_start]
            nemesis.place.start(run, launch)
            strikes += [fault.strike(run) for fault in nemesis.faults if not fault.before_start]
            struck = together(strikes)
            ending = run.end(min(nemesis.promise.within_s + SLACK_S, LIMIT_S), struck.at)
        finally:
            run.kill()
            for fault in reversed(nemesis.faults):
                fault.heal(run)
        newer, other = run.whole.accepted(run.folder, struck.step)
        off = [] if guarded else [each for each in launch.plants if each not in nemesis.launch(guarded=True).plants]
        return Phase(struck, ending, newer, other, idle=idle(off, run.scratch))

    def _healed(self, nemesis: Nemesis, run: Run, phase: Phase, *, guarded: bool) -> Phase:
        launch = nemesis.heal(guarded=guarded)
        nemesis.place.start(run, launch)
        healing = run.end(LIMIT_S, time.monotonic())
        unmoved = (*phase.idle, *idle(launch.plants, run.scratch))
        return replace(phase, healing=healing, result=run.whole.differs(run.folder), idle=unmoved)

    def _control(self, nemesis: Nemesis) -> tuple[str, ...]:
        """The same run without the fault; played once for all nemeses that start alike."""
        launch, key = nemesis.calm(), nemesis.calm_key()
        if key not in self._calm:
            with self._opened("calm", nemesis) as run:
                nemesis.place.start(run, launch)
                ending = run.end(LIMIT_S, time.monotonic())
                self._calm[key] = judging.not_calm(ending, run.whole.differs(run.folder))
        return self._calm[key]

    @contextmanager
    def _opened(self, what: str, nemesis: Nemesis) -> Iterator[Run]:
        """A run in the place of a nemesis; whatever happens, its processes are ended, and then the place given back."""
        run = self.open(what, f"{nemesis.name} {self.seed}")
        with nemesis.place.taken(run):
            try:
                yield run
            finally:
                run.kill()

    def open(self, what: str, draw: str) -> Run:
        """A run in a folder of its own, of which nothing is started yet. draw: what its random choices come from."""
        scratch = Path(tempfile.mkdtemp(prefix=f"{what}-", dir=self.base))
        run = Run(scratch, scratch / "run", self.rows, self.held, self.whole, random.Random(draw), self.closing)
        self._runs.append(run)
        return run

    def close(self) -> None:
        """Have whoever plays here stop: what is under way is ended, so that it is undone and released there."""
        self.closing.set()
        for run in self._runs:
            run.kill()


def together(strikes: Sequence[Struck]) -> Struck:
    """Several faults of one run as one: bounds are counted from the last, what is accepted from the first."""
    proof = "; ".join(each.proof for each in strikes)
    return Struck(max(each.at for each in strikes), min(each.step for each in strikes), proof)
