"""Plays a nemesis in real runs of `andon train`: fault, heal, control without fault, control without guard."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import disk, inside, judging, network, rows, signals
from .language import Guard, Nemesis, Phase, Row
from .left_behind import Undisturbed
from .planting import ClosingError, NotStruckError, UnavailableError, idle
from .run import LIMIT_S, SLACK_S, UPDATES, Launch, Run, row_lines

NEMESES = (*signals.NEMESES, *inside.NEMESES, *rows.NEMESES, *disk.NEMESES, *network.NEMESES)


@dataclass
class Bench:
    base: Path
    reference: Undisturbed
    rows: Path
    eval_rows: Path
    seed: int
    closing: threading.Event = field(default_factory=threading.Event)
    _controls: dict[object, tuple[str, ...]] = field(default_factory=dict)
    _runs: list[Run] = field(default_factory=list)

    @classmethod
    def prepare(cls, base: Path, seed: int = 1) -> Bench:
        """Write the rows and train undisturbed. Raises `RuntimeError` if that fails."""
        bench = cls(base, Undisturbed(base / "undisturbed"), base / "rows.jsonl", base / "held.jsonl", seed)
        for path, count in ((bench.rows, 96), (bench.eval_rows, 12)):
            path.write_bytes(b"".join(row_lines(path.name, count)))
        run = replace(bench.open("undisturbed", str(seed)), folder=bench.reference.folder)
        try:
            run.start(Launch(settings=("training.checkpoint_every=1",)))
            ending = run.end()
        finally:
            run.kill()
        if ending.codes != (0,):
            raise RuntimeError(f"the undisturbed run ended with {ending.codes}: {ending.output[-2000:]}")
        if lacking := bench.reference.lacking(UPDATES):
            raise RuntimeError(f"nothing can be compared with the undisturbed run: {lacking}")
        return bench

    def play(self, nemesis: Nemesis) -> Row:
        """Play a nemesis with both of its controls, and judge it. Raises `ClosingError` after `close`."""
        try:
            phase, *unguarded = self.disturbed(nemesis)
            wrong, without_fault = judging.wrong(nemesis.promise, phase), self._control(nemesis)
        except ClosingError:
            raise
        except UnavailableError as error:
            return Row(nemesis, skipped=str(error))
        except NotStruckError as error:
            return Row(nemesis, failed=f"the fault did not happen: {error}")
        except Exception as error:  # noqa: BLE001 - a broken nemesis must not lose the rows of the others
            return Row(nemesis, failed=f"the nemesis failed: {type(error).__name__}: {error}")
        row = Row(nemesis, phase=phase, wrong=wrong, without_fault=without_fault)
        for phase in unguarded:
            found = judging.wrong(nemesis.promise, phase)
            row = replace(row, unguarded=found, doubt=judging.doubt(phase, found, nemesis.guard))
        return row

    def disturbed(self, nemesis: Nemesis) -> list[Phase]:
        with self._opened("guarded", nemesis) as run:
            phases = [self._healed(nemesis, run, self._fault(nemesis, run))]
        if isinstance(guard := nemesis.guard, Guard):
            off, plants = nemesis.unguarded(guard), guard.plants
            with self._opened("unguarded", nemesis) as run:
                phase = self._fault(off, run)
                if not judging.wrong_before_healing(off.promise, phase):  # otherwise resuming would add nothing
                    phase, plants = self._healed(off, run, phase), (*plants, *guard.resume_plants)
                phases.append(replace(phase, idle=idle(plants, run.scratch)))
        return phases

    def _fault(self, nemesis: Nemesis, run: Run) -> Phase:
        fault = nemesis.fault
        try:
            struck = fault.strike(run) if fault.before_start else None
            nemesis.place.start(run, nemesis.launch())
            struck = struck or fault.strike(run)
            ending = run.end(min(nemesis.promise.within_s + SLACK_S, LIMIT_S), struck.at)
        finally:
            run.kill()
            fault.heal(run)
        return Phase(struck, ending, *run.reference.accepted(run.folder, struck.step))

    def _healed(self, nemesis: Nemesis, run: Run, phase: Phase) -> Phase:
        nemesis.place.start(run, nemesis.heal())
        return replace(phase, healing=run.end(), result=run.reference.differs(run.folder))

    def _control(self, nemesis: Nemesis) -> tuple[str, ...]:
        """The same run without faults, played once for all nemeses with the same place and launch."""
        launch = nemesis.undisturbed or nemesis.launched
        if (key := (nemesis.place, launch)) not in self._controls:
            with self._opened("control", nemesis) as run:
                nemesis.place.start(run, launch)
                self._controls[key] = judging.wrong_without_fault(run.end(), run.reference.differs(run.folder))
        return self._controls[key]

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
        files = (self.rows, self.eval_rows)
        run = Run(scratch, scratch / "run", *files, self.reference, random.Random(draw), self.closing)
        self._runs.append(run)
        return run

    def close(self) -> None:
        """End all runs from another thread. The threads that play them undo their faults."""
        self.closing.set()
        for run in self._runs:
            run.kill()
