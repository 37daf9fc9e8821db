"""The two exchanges of a watched update, before the optimizer's step and after it: a loop over the checks.

What is read after an update is judged at once on a CPU. On a GPU the update is still queued then, and waiting for it
would starve the device. So it is judged just before the next update, at the next collective call, or at the close.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from andon_contracts.causes import first_line
from andon_contracts.laws.law import LOCKSTEP, Judgement, Law, Observations, Seen, in_lockstep
from andon_contracts.observe import start_to_cpu
from andon_contracts.watch.check import Check, Context, OptimizerProbe, Values
from andon_contracts.watch.checks.audit import Audit
from andon_contracts.watch.checks.copies import ModelCopies
from andon_contracts.watch.checks.frozen import Buffers, Frozen
from andon_contracts.watch.checks.gradients import Clipping, ClipPlace, Gradients
from andon_contracts.watch.checks.optimizer import Applied, Optimizer
from andon_contracts.watch.checks.reports import LoopReports, Outcomes
from andon_contracts.watch.checks.rows import LoadedRows
from andon_contracts.watch.checks.scale import GradientScale
from andon_contracts.watch.checks.structure import START, Mode, Structure
from andon_contracts.watch.checks.weights import PARTED, Weights
from andon_contracts.watch.locate import report_after, report_before, report_start
from andon_contracts.watch.model_probe import ModelProbe

_AT_THE_CLOSE_S = 5.0
"""Seconds that a rank waits at its close for what the others saw after the last update."""


def add_checks(context: Context, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Make the checks of a watch: those of the whole loop, and those of each optimizer.

    Their order is the order in which laws are judged and told of: causes before effects.
    """
    structure, mode, frozen, place = Structure(context), Mode(context), Frozen(context), ClipPlace(context)
    buffers, outcomes, rows, copies = Buffers(context), Outcomes(context), LoadedRows(context), ModelCopies(context)
    reports = LoopReports(context)
    context.checks = [structure, mode, buffers, frozen, reports, outcomes, rows, place, copies]
    for optimizer in optimizers:
        probe = OptimizerProbe(optimizer, context)
        weights, scale = Weights(context, probe), GradientScale(context, probe)
        probe.checks = [
            *(structure, mode, Optimizer(context, probe), buffers, weights, frozen, Gradients(context, probe, scale)),
            *(Clipping(context, probe), Applied(context, probe)),
            *(outcomes, rows, place, copies, scale, reports, Audit(context, probe)),
        ]
        context.probes.append(probe)


def all_checks(context: Context) -> list[Check]:
    """Every check once: those of the whole loop first."""
    own = [check for probe in context.probes for check in probe.checks if check not in context.checks]
    return [*context.checks, *own]


@dataclass(frozen=True)
class _UnjudgedUpdate:
    """An update that was made and is not judged yet. ids: the rows that it was made of."""

    probe: OptimizerProbe
    step: int
    values: Callable[[], Values]
    ids: list[int]


def _judged_late(subject: ModelProbe) -> bool:
    """Whether an update is judged before the next one, because a device makes it that may not be waited for."""
    return subject.gpu() is not None


class Updates:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._before_laws: dict[OptimizerProbe, Sequence[Law[Seen[object]]]] = {}
        self._after_laws: dict[OptimizerProbe, Sequence[Law[Seen[object]]]] = {}
        self._said: Observations = ()
        self._aligned: Observations = ()
        self._late = False
        """Whether updates are judged before the next one, because every rank's device makes them."""
        self._unjudged: _UnjudgedUpdate | None = None

    def start(self) -> None:
        """Meet the other ranks, and compare what the loop starts from. Collective."""
        context, subject = self._context, self._context.subject
        context.exchange.connect()
        kinds = {parameter.device.type for parameter in subject.parameters.values()}
        longest = max((probe.longest for probe in context.probes), default=0)
        own = {"on the CPU": int(kinds == {"cpu"}), "late": int(_judged_late(subject)), "longest": longest}
        devices: Seen[object] = Seen(context.exchange(0, "devices", own), None)
        self._late = all(devices.column("late"))
        context.portable, context.longest = "on the CPU" in devices.differing, max(devices.column("longest"))
        for check in all_checks(context):
            check.ranks_met()
        for probe in context.probes:
            alive = context.verdicts.live_laws
            self._before_laws[probe] = alive((LOCKSTEP, *(law for check in probe.checks for law in check.before_laws)))
            self._after_laws[probe] = alive((LOCKSTEP, *(law for check in probe.checks for law in check.after_laws)))
        values = context.check(Structure).start(portable=context.portable)
        said = context.replicas.align(context.exchange(0, "start", values, judged=True))
        context.recorder.opened(
            context.world, [probe.optimizer for probe in context.probes], context.settings.rows, context.settings.start
        )
        seen: Seen[object] = Seen(said, None, subject.names)
        judgement = context.verdicts.judgement(context.verdicts.live_laws(START), seen)
        if judgement.first is None:
            self._note_equal(context.settings.start, seen)
        else:
            report_start(context, judgement, START)
        context.check(LoopReports).compare_data()

    def before(self, probe: OptimizerProbe) -> None:
        """The optimizer of `probe` is about to make an update. Collective."""
        context, checks, step = self._context, probe.checks, probe.updates + 1
        with context.added:
            arrive = start_to_cpu(*(tensors for check in checks for tensors in check.look(probe)))
            values: Values = {}
            for check in checks:
                values |= check.meanwhile(probe)
            arrive()
            for check in checks:
                values |= check.before(probe)
            self._said = context.exchange(step, f"before {self._number(probe)}", values, judged=True)
            self._aligned = self._judge_before(probe, context.replicas.align(self._said))
            if in_lockstep(self._aligned):
                for check in checks:
                    check.judge(probe, self._said, self._aligned)

    def _judge_before(self, probe: OptimizerProbe, said: Observations) -> Observations:
        """Judge the laws of all checks. Returns the table that they were held to."""
        deferred: frozenset[str] = frozenset()
        for check in probe.checks:
            said = check.align(said)
        seen: Seen[object] = Seen(said, None, self._context.subject.names)
        if in_lockstep(said):
            deferred = deferred.union(*(check.deferred(seen) for check in probe.checks))
        laws = tuple(law for law in self._before_laws[probe] if law.clause not in deferred)
        judgement = self._context.verdicts.judgement(laws, seen)
        if judgement.first is not None:
            report_before(probe, judgement, laws)
        return said

    def after(self, probe: OptimizerProbe) -> None:
        """The optimizer of `probe` made an update."""
        context = self._context
        with context.added:
            probe.updates += 1
            context.steps += 1
            arrive = start_to_cpu(*(tensors for check in probe.checks for tensors in check.look_after(probe)))
            parts = [check.after(probe) for check in probe.checks]

            def values() -> Values:
                arrive()
                found: Values = {}
                for part in parts:
                    found |= part()
                return found

            self._unjudged = _UnjudgedUpdate(probe, probe.updates, values, context.rows.ids)
            probe.updated()
        if not self._late:
            self.judge_made()

    def judge_made(self) -> None:
        """Judge the last update, if it was not yet. Collective."""
        made, self._unjudged = self._unjudged, None
        if made is None:
            return
        context = self._context
        with context.added:
            point = f"after {self._number(made.probe)}"
            said = context.exchange(made.step, point, made.values(), judged=True)
            judgement, laws = self._judge_after(made.probe, said)
            if judgement.first is not None:
                with context.rows.of_update(made.ids, is_past=self._late):
                    report_after(made.probe, judgement, laws, self._aligned)
            self._note_equal(made.step, judgement.seen)
            made.probe.states_equal = "optimizer" not in judgement.seen.differing

    def _judge_after(
        self, probe: OptimizerProbe, said: Observations
    ) -> tuple[Judgement[Seen[object]], Sequence[Law[Seen[object]]]]:
        """Write down what all ranks saw after an update. Returns its judgement, and the laws that were judged."""
        context, synchrony = self._context, probe.check(Weights).synchrony
        if context.settings.recording and self._said and in_lockstep(self._said) and in_lockstep(said):
            several = len(context.probes) > 1
            context.recorder.step(
                self._said,
                said,
                context.check(LoopReports).of_update,
                step=context.settings.start + context.steps if several else probe.updates,
                index=self._number(probe) if several else None,
                draws=context.check(Mode).draws,
            )
        seen: Seen[object] = Seen(context.replicas.align(said), None, context.subject.names)
        waiting = synchrony.after(seen) if in_lockstep(said) else frozenset[str]()
        laws = tuple(law for law in self._after_laws[probe] if law.clause not in waiting)
        if synchrony.parted(seen.step):
            laws += context.verdicts.live_laws((PARTED,))
        return context.verdicts.judgement(laws, seen), laws

    def judge_last(self) -> str:
        """At the close: judge the last update, if it was not yet, with what the others say within some seconds.

        Not collective. Returns a line that says so if not all ranks came.
        """
        made, self._unjudged = self._unjudged, None
        if made is None:
            return ""
        try:
            point = f"after {self._number(made.probe)}"
            said = self._context.exchange.gather_at_close(made.step, point, made.values(), _AT_THE_CLOSE_S)
        except (RuntimeError, OSError) as error:
            why = str(error) if isinstance(error, TimeoutError) else first_line(error)
            return f"  what update {made.step} left was not compared: {why}"
        judgement, _ = self._judge_after(made.probe, said)
        self._context.verdicts.report_alone(judgement, self._context.scene(applied=True), on_all_ranks=True)
        return ""

    def _note_equal(self, step: int, seen: Seen[object]) -> None:
        if len(seen.observations) > 1 and "weights" not in seen.differing:
            self._context.last_equal = step

    def _number(self, probe: OptimizerProbe) -> int:
        return self._context.probes.index(probe)
