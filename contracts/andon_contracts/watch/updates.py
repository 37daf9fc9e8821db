"""The two gathers of a watched update, before it and after it: what is observed, told, judged and written down.

What is seen after an update is judged there on a CPU. A GPU still has the update to make then, and a host that waited
for it would have nothing ready for it behind it: so it is judged before the next update, or at whatever else all ranks
do together, or at the close, with what the other ranks say within some seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from andon_contracts.act import Scene
from andon_contracts.added_time import AddedTime
from andon_contracts.agree import Observation
from andon_contracts.causes import first_line
from andon_contracts.laws.law import Judgement, Law, Observations, Seen, in_lockstep
from andon_contracts.laws.loop import AFTER, BEFORE, NEVER_MET, PARTED, START, each_by_itself
from andon_contracts.laws.scale import SCALE
from andon_contracts.laws.update import FROZEN, Reduced
from andon_contracts.observe import Observer
from andon_contracts.watch.auditing import Auditor
from andon_contracts.watch.exchange import Exchange
from andon_contracts.watch.gradient_scale import scale_lines
from andon_contracts.watch.judging import Verdicts
from andon_contracts.watch.ledger import Recorder, Told
from andon_contracts.watch.loaders import outside_of_transforms
from andon_contracts.watch.locate import Locator
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.model_state import BufferProbe, Followers, FrozenBase
from andon_contracts.watch.optimizer_probe import OptimizerProbe
from andon_contracts.watch.outcomes import Outcomes
from andon_contracts.watch.practice import Practice
from andon_contracts.watch.replicas import Replicas
from andon_contracts.watch.rows import Rows
from andon_contracts.watch.synchrony import State
from andon_contracts.watch.user_reports import UserReports
from andon_contracts.watch.values import roles_digest

_AT_THE_CLOSE_S = 5.0
"""Seconds that a rank waits at its close for what the others saw after the last update."""


@dataclass(frozen=True)
class _Made:
    """An update that was made and is not judged yet."""

    probe: OptimizerProbe
    step: int
    values: Callable[[], dict[str, int]]
    ids: list[int]
    """The rows that it was made of."""


def _judged_late(subject: ModelProbe) -> bool:
    """Whether an update is judged before the next one, because it takes a device that may not be waited for."""
    return subject.gpu() is not None


class Updates:
    """The updates of a watched loop. `steps` were made so far."""

    def __init__(
        self,
        subject: ModelProbe,
        probes: Sequence[OptimizerProbe],
        exchange: Exchange,
        replicas: Replicas,
        verdicts: Verdicts,
        recorder: Recorder,
        rows: Rows,
    ) -> None:
        self._subject = subject
        self._probes = probes
        self._exchange = exchange
        self._replicas = replicas
        self._verdicts = verdicts
        self._settings = verdicts.settings
        self._recorder = recorder
        self._rows = rows
        self.locator = Locator(exchange, replicas, verdicts, subject, rows)
        self.auditor = Auditor(exchange, verdicts, rows, probes)
        self.reports = UserReports(exchange, verdicts, rows)
        self.outcomes = Outcomes(exchange, verdicts, probes, recorder, subject)
        apart = replicas.cut or not subject.every_rank_has_rows
        self.practice = Practice(
            exchange, verdicts, subject, rows, apart=apart, muted=lambda: any(probe.taps.muted for probe in probes)
        )
        self._before_laws, self._after_laws = verdicts.alive(BEFORE), verdicts.alive(AFTER)
        self._want = each_by_itself(None)
        follows = subject.followers()
        self._base = FrozenBase([p for name, p in subject.frozen.items() if name not in follows])
        self._followers = Followers(list(follows.values()))
        self._buffers = [BufferProbe() for _ in subject.homes]
        self._seen_before: Observations = ()
        self._aligned: Observations = ()
        self._added = AddedTime(subject.gpu())
        self._late = False
        """Whether an update is judged before the next one."""
        self._made: _Made | None = None
        self.steps = 0

    @property
    def made(self) -> int:
        """The updates of the optimizer that has made most, those before the watch included."""
        return max(probe.updates for probe in self._probes)

    def spent(self, *, wait: bool) -> float:
        """Seconds that looking at updates and at gradients took so far.

        wait: for GPUs, to the last of it; while the cord is there, which ends a wait for a rank that is gone.
        """
        return self._added.seconds(wait=wait) + sum(probe.taps.spent(wait=wait) for probe in self._probes)

    def start(self) -> None:
        """Acquaintance with the other ranks' replicas, and the first look at them. Collective."""
        subject = self._subject
        self._exchange.connect()
        portable = self._devices_differ()
        held = frozenset[int]().union(*(probe.held for probe in self._probes))  # others may have a master weight
        low = [i for i, s in enumerate(subject.slots) if id(s.parameter) in held and s.parameter.element_size() < 4]
        values = {
            "change": subject.fault_at_start(),
            "layout": roles_digest(subject.parameters),
            "weights": Observer(portable=portable).look(list(subject.parameters.values())).digest,
            "imprecise": low[0] + 1 if low else 0,
        }
        observations = self._replicas.align(self._exchange(0, "start", values, judged=True))
        optimizers = [probe.optimizer for probe in self._probes]
        self._recorder.opened(self._exchange.world_size, optimizers, self._settings.rows, self._settings.start)
        seen: Seen[object] = Seen(observations, None, subject.names)
        judgement = self._verdicts.judgement(self._verdicts.alive(START), seen)
        if judgement.first is None:
            self.locator.note_equal(self._settings.start, seen)
        else:
            self.locator.start(judgement)
        self.reports.look_at_data()

    def _devices_differ(self) -> bool:
        """Whether replicas are on different kinds of devices; if so, their digests are made comparable. Collective.

        Only where every rank's device takes the update is one judged late: all are to judge it at the same place.
        """
        kinds = {parameter.device.type for parameter in self._subject.parameters.values()}
        longest = max((probe.longest for probe in self._probes), default=0)
        said = {"on the CPU": int(kinds == {"cpu"}), "late": int(_judged_late(self._subject)), "longest": longest}
        seen: Seen[object] = Seen(self._exchange(0, "devices", said), None)
        self._late = all(seen.column("late"))
        self._want = each_by_itself(self._settings.clip or None, max(seen.column("longest")))
        differ = "on the CPU" in seen.differing
        for each in self._buffers:
            each.portable(differ)
        for probe in self._probes:
            probe.portable(differ)
        self.practice.copies.portable = differ
        return differ

    def forward(self, home: int) -> None:
        """A forward pass of the module begins whose number among those that hold buffers is `home`."""
        if not torch.is_grad_enabled():
            self.outcomes.norm_in_training = self._subject.norm_in_training()
        if "buffers-agree" not in self._verdicts.live or not torch.is_grad_enabled():
            return
        probes = [probe for probe in self._probes if not probe.taps.started]
        if not probes or any(probe.taps.muted for probe in probes):
            return
        kept, caches = self._subject.homes[home].buffers()
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, (*kept, *caches))):
            return  # a transform of `torch.func` calls the model with buffers of its own
        with self._added, outside_of_transforms():
            digests = self._buffers[home].digests(kept, caches, self.made + 1)
            for probe in probes:
                probe.looks.add(home, digests)

    def after(self, probe: OptimizerProbe) -> None:
        """An update of `probe`'s optimizer was made."""
        with self._added:
            found = probe.after()
            self.steps, self.outcomes.norm_in_training = self.steps + 1, 0
            self._made = _Made(probe, probe.updates, found, self._rows.ids)
            probe.turn()
            self.practice.turn()
        if not self._late:
            self.judge_made()

    def judge_made(self) -> None:
        """Judge the last update, if it was not yet. Collective."""
        made, self._made = self._made, None
        if made is None:
            return
        with self._added:
            said = self._exchange(made.step, self._point_after(made), made.values(), judged=True)
            judgement, laws = self._held(made, said)
            if judgement.first is not None:
                with self._rows.of_update(made.ids, gone_on=self._late):
                    self.locator.after(made.probe, judgement, laws, self._aligned)
            self.locator.note_equal(made.step, judgement.seen)
            made.probe.moments_equal = "optimizer" not in judgement.seen.differing

    def _held(self, made: _Made, said: Observations) -> tuple[Judgement[Seen[object]], tuple[Law[Seen[object]], ...]]:
        """What all ranks saw after an update, written down, and the laws that it is held to."""
        self._record(made.probe, said)
        seen: Seen[object] = Seen(self._replicas.align(said), None, self._subject.names)
        synchrony = made.probe.synchrony
        waiting = synchrony.after(seen) if in_lockstep(said) else frozenset[str]()
        laws = tuple(law for law in self._after_laws if law.clause not in waiting)
        if synchrony.parted(made.step):
            laws += self._verdicts.alive(PARTED)
        return self._verdicts.judgement(laws, seen), laws

    def judge_last(self) -> str:
        """At the close: judge the last update, if it was not yet, with what the others say within some seconds.

        Not collective: who does not come is not waited for. Returns a line that says so, if that was not all ranks.
        """
        made, self._made = self._made, None
        if made is None:
            return ""
        try:
            said = self._exchange.closing(made.step, self._point_after(made), made.values(), _AT_THE_CLOSE_S)
        except (RuntimeError, OSError) as error:
            why = str(error) if isinstance(error, TimeoutError) else first_line(error)
            return f"  what update {made.step} left was not compared: {why}"
        judgement, _ = self._held(made, said)
        for law in judgement.broken():
            scene = Scene(self._exchange.world_size, applied=True)
            found = judgement.violation(law)
            self._verdicts.take(found, scene, alone=True, by_all=True, suspicion=law.suspicion)
        return ""

    def _point_after(self, made: _Made) -> str:
        return f"after {self._number(made.probe)}"

    def _record(self, probe: OptimizerProbe, after: Observations) -> None:
        if not self._settings.recording or not self._seen_before:
            return
        if not (in_lockstep(self._seen_before) and in_lockstep(after)):
            return
        several = len(self._probes) > 1
        step = self._settings.start + self.steps if several else probe.updates
        index = self._number(probe) if several else None
        self._recorder.step(
            self._seen_before, after, self.reports.told_rows, step=step, index=index, draws=self.practice.draws
        )

    def _number(self, probe: OptimizerProbe) -> int:
        return self._probes.index(probe)

    def before(self, probe: OptimizerProbe) -> None:
        """An update of `probe`'s optimizer is about to be made."""
        with self._added:
            self._before(probe)

    def _before(self, probe: OptimizerProbe) -> None:
        step = probe.updates + 1
        practised = self.practice.values()  # ahead of copies that are made here
        self._base.look()
        seen_here = probe.before([self.practice.waiting(), *self._base.waiting()])
        together = probe.synchrony.state is State.TOGETHER
        merges = bool(seen_here["written"]) and together and bool(self._base)
        base = self._base_values(self._base.digest(whole=merges))
        told = {**self.reports.told(), **practised, **self.practice.given()}
        values = {**seen_here, **told, **base, **self._followers.digests(step)}
        self._seen_before = self._exchange(step, f"before {self._number(probe)}", values, judged=True)
        observations = self._aligned = self._merged(self._replicas.align(self._seen_before))
        self.reports.told_rows = Told()
        seen: Seen[Reduced] = Seen(observations, self._want, self._subject.names)
        waiting = probe.synchrony.before(seen) if in_lockstep(observations) else frozenset[str]()
        laws = tuple(law for law in self._before_laws if law.clause not in waiting)
        judgement = self._verdicts.judgement(laws, seen)
        if judgement.first is not None:
            self.locator.before(probe, judgement, laws)
        if in_lockstep(observations):
            self.outcomes.judge_count(probe.updates, over=False)
            self.practice.judge(self._seen_before)
            scaled = probe.scale.judged(self._seen_before)
            if scaled.now is not None:
                self._verdicts.judge(SCALE, scaled, Scene(self._exchange.world_size))
            ids = self.reports.judge_rows(observations, probe.skipped)
            # What no one has reduced yet is no gradient of all rows.
            if probe.synchrony.known:
                self.auditor(probe, step, ids, lambda: self.locator.scene(probe, observations, applied=False))

    def _base_values(self, digest: int) -> dict[str, int]:
        """What is said of the frozen weights: their digests now and at first, and the place of one that changed."""
        said = self._verdicts.known(FROZEN.clause) or self._verdicts.suspected[FROZEN.clause]
        changed = None if said or digest == self._base.first else self._base.changed()
        place = 0 if changed is None else self._subject.names.index(self._subject.name_of()[id(changed)]) + 1
        return {"base": digest, "first base": self._base.first, "base at": place}

    def _merged(self, observations: Observations) -> Observations:
        """`observations`, with a base as it is now where all ranks merged what they trained into it (ReLoRA).

        They wrote the trained weights and the base, alike, between two updates.
        """
        if not self._base or not in_lockstep(observations) or not all(o.values["written"] for o in observations):
            return observations
        seen: Seen[object] = Seen(observations, None)
        moved = all(o.values["base"] != o.values["first base"] for o in observations)
        apart = "weights" in seen.differing or ("base" in seen.differing and "first base" not in seen.differing)
        if apart or not moved:
            return observations
        self._base.accept()
        return tuple(replace(o, values={**o.values, "first base": o.values["base"]}) for o in observations)

    def judge_parted(self) -> list[str]:
        """Hold weights that parted to having agreed again, at the close. Each rank knows it of all.

        Returns what the loop turned out to do, in lines.
        """
        for probe in self._probes:
            parted = probe.synchrony.since if probe.synchrony.state is State.APART else 0
            said = (Observation(self._exchange.rank, probe.updates, 0, "close", {"parted": parted}),)
            judgement = self._verdicts.judgement(self._verdicts.alive(NEVER_MET) if parted else (), Seen(said, None))
            for law in judgement.broken():
                scene = Scene(self._exchange.world_size, applied=True)
                self._verdicts.take(judgement.violation(law), scene, alone=True, by_all=True)
        return list(filter(None, (probe.synchrony.closing_line() for probe in self._probes)))

    def lines(self) -> list[str]:
        """For the end: what was seen of the rows and of the scale of gradients, which a reference says better."""
        scales = [] if self._settings.reference is not None else [probe.scale for probe in self._probes]
        found = [*self.practice.lines(), self.practice.line_of_copies()]
        return [*filter(None, found), *scale_lines(scales, self._exchange.world_size, sys.argv)]

    def judge_base(self) -> str:
        """Read all frozen weights once more, and hold them to the start: this rank alone, because a close is.

        Returns a line that says why they were not read, where they were not and might have been.
        Where the model was changed after its last update, by a merge or a load, they may rightly be others.
        """
        clause = FROZEN.clause
        known = self._verdicts.known(clause) or self._verdicts.suspected[clause]
        if clause not in self._verdicts.live or known or not self.steps:
            return ""
        touched = not (self._base.untouched and all(probe.untouched for probe in self._probes))
        why = "weights were written after the last update" if touched else self._subject.became()
        if why:
            return f"  base-frozen: not read once more at the end, because {why}"
        values = self._base_values(self._base.last_look())
        said = (Observation(self._exchange.rank, self.made, 0, "close", values),)
        judgement = self._verdicts.judgement((FROZEN,), Seen(said, None, self._subject.names))
        if judgement.first is not None:
            self._verdicts.take(judgement.violation(FROZEN), Scene(self._exchange.world_size, applied=True), alone=True)
        return ""
