"""The two exchanges of a watched update, before the optimizer's step and after it: a loop over the checks.

If all ranks train on GPUs, an update is still queued when its step returns, and waiting would starve the device. So the
state after it is judged just before the next update, at the next collective call, or at the close; else at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from andon_contracts.act import Scene
from andon_contracts.laws.law import LOCKSTEP, Details, Judgement, Observations, Seen, in_lockstep
from andon_contracts.observe import plain, start_to_cpu
from andon_contracts.violation import Violation, first_line
from andon_contracts.watch.check import Check, Context, Laws, OptimizerProbe, Values
from andon_contracts.watch.checks.audit import Audit
from andon_contracts.watch.checks.buffers import Buffers
from andon_contracts.watch.checks.clipping import Clipping, ClipPlace
from andon_contracts.watch.checks.copies import ModelCopies
from andon_contracts.watch.checks.frozen import Frozen
from andon_contracts.watch.checks.gradients import Gradients
from andon_contracts.watch.checks.mode import Mode
from andon_contracts.watch.checks.optimizer import Applied, Optimizer, hyperparameters_by_key
from andon_contracts.watch.checks.outcomes import Outcomes
from andon_contracts.watch.checks.passes import Passes
from andon_contracts.watch.checks.reports import LoopReports
from andon_contracts.watch.checks.resume import ResumedRun
from andon_contracts.watch.checks.rows import LoadedRows
from andon_contracts.watch.checks.sketch import GradientSketch
from andon_contracts.watch.checks.structure import START, Structure
from andon_contracts.watch.checks.token_weights import LogitRows, TokenWeights
from andon_contracts.watch.checks.weights import PARTED, Weights
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.values import layout_digest, state_digest, trainable_layout_digest

_AT_THE_CLOSE_S = 5.0
"""Seconds that a rank waits at its close for the others' values after the last update."""


def add_checks(context: Context, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Make the checks of the whole loop and of each optimizer, in the order of judging: causes before effects."""
    structure, mode, frozen, place = Structure(context), Mode(context), Frozen(context), ClipPlace(context)
    buffers, outcomes, rows, copies = Buffers(context), Outcomes(context), LoadedRows(context), ModelCopies(context)
    reports, logits = LoopReports(context), LogitRows(context)
    recorded: list[Check] = [ResumedRun(context)] if context.settings.recording else []
    recorded += [GradientSketch(context)] if context.settings.sketching else []
    context.checks = [structure, mode, buffers, frozen, reports, outcomes, rows, place, copies, logits, *recorded]
    for optimizer in optimizers:
        probe = OptimizerProbe(optimizer, context)
        weights, scale = Weights(context, probe), TokenWeights(context, probe, logits)
        # All ranks have the same settings, so either all of them or none has these checks.
        clipping = [] if context.settings.clip is None else [Clipping(context, probe)]
        audit = [] if context.settings.reference is None else [Audit(context, probe)]
        gradients = Gradients(context, probe, scale, next(iter(clipping), None))
        probe.checks = [
            *(structure, mode, Optimizer(context, probe), buffers, weights, frozen, gradients),
            *(*clipping, Applied(context, probe), outcomes, rows, place, copies, scale, reports, *audit, *recorded),
            Passes(context, probe),
        ]
        context.probes.append(probe)
    context.all_checks = list(dict.fromkeys([*context.checks, *(c for probe in context.probes for c in probe.checks)]))


def _judged_late(subject: ModelProbe) -> bool:  # a name of its own, so that a test without a GPU can replace it
    return subject.gpu() is not None


def merged(parts: Sequence[Values]) -> Values:
    """The values of all checks. Raises `ValueError` if two checks send the same name: one value would be lost."""
    values = dict(chain.from_iterable(part.items() for part in parts))
    if len(values) < sum(map(len, parts)):
        raise ValueError(f"two checks send the same name, of {[*map(list, parts)]}")
    return values


class Updates:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._before_laws: dict[OptimizerProbe, Laws] = {}
        self._after_laws: dict[OptimizerProbe, Laws] = {}
        self._met: set[OptimizerProbe] = set()  # those that made an update
        self._said: Observations = ()  # the values of all ranks before the last update that was read in full
        self._aligned: Observations = ()
        self._reporting = False
        """Whether the loop reported rows, or ranks were at different points: then every update is read in full."""
        self._late = False  # whether an update is judged just before the next one, because every rank trains on a GPU
        self._unjudged: tuple[OptimizerProbe, Callable[[], Values], list[int]] | None = None
        """The last update if it is not judged yet: its probe, a function that gives the values after it, its rows."""

    def start(self) -> None:
        """Connect to the other ranks, and compare parameters and data at the start. Collective."""
        context, subject = self._context, self._context.subject
        context.exchange.connect()
        kinds = {parameter.device.type for parameter in subject.parameters.values()}
        trained = (p for probe in context.probes for p in probe.members)
        longest = max((p.numel() for p in trained if p.device.type == "cpu"), default=0)
        own = {"on the CPU": int(kinds == {"cpu"}), "late": int(_judged_late(subject)), "longest": longest}
        devices: Seen[object] = Seen(context.exchange(0, "devices", own), None)
        self._late = all(devices.column("late"))
        context.portable, context.longest = "on the CPU" in devices.differing, max(devices.column("longest"))
        for check in context.all_checks:
            check.ranks_met()
        for probe in context.probes:
            before = (law for check in probe.checks for law in check.before_laws if probe.even or not law.of_shards)
            self._before_laws[probe] = (LOCKSTEP, *filter(context.replicas.compares, before))
            after = (law for check in probe.checks for law in check.after_laws)
            self._after_laws[probe] = (LOCKSTEP, *filter(context.replicas.compares, after))
        values = context.check(Structure).start(portable=context.portable)
        said = context.replicas.align(context.exchange(0, "start", values, judged=True))
        context.recorder.opened(
            context.world, [probe.optimizer for probe in context.probes], context.settings.rows, context.settings.start
        )
        seen: Seen[object] = Seen(said, None, subject.names)
        judgement = context.verdicts.judgement([*filter(context.replicas.compares, START)], seen)
        if judgement.first is None:
            self._note_equal(context.settings.start, seen)
        else:
            tensors = subject.parameters
            _report(context, judgement, None, Scene(context.world, tensors=len(tensors)), {"replicas-agree": tensors})
        context.check(LoopReports).compare_data()

    def before(self, probe: OptimizerProbe) -> None:
        """Read, gather and judge the values before an update by the optimizer of `probe`. Collective."""
        context, checks = self._context, probe.checks
        if context.settings.recording and probe not in self._met:
            self._met.add(probe)
            context.check(ResumedRun).meet(probe)  # it may set the count of updates
        step = probe.updates + 1
        if not probe.full:
            self._pass_over(probe, step)
            return
        with context.timed():
            with context.pace.on_device():
                looks = [tensors for check in checks for tensors in check.look(probe)]
            arrive = start_to_cpu(*looks)
            early = [self._interval(probe), *(check.meanwhile(probe) for check in checks)]
            with context.waiting():
                arrive()
            values = merged([*early, *(check.before(probe) for check in checks)])
            self._said = context.exchange(step, f"before {probe.number}", values, judged=True)
            self._adopt(self._said)
            aligned = context.replicas.align(self._said)
            for check in checks:
                aligned = check.align(aligned)
            self._aligned, seen = aligned, Seen[object](aligned, None, context.subject.names)
            not_due = frozenset[str]().union(*(c.deferred(seen) for c in (checks if in_lockstep(aligned) else ())))
            laws = [law for law in self._before_laws[probe] if law.clause not in not_due]
            judgement = context.verdicts.judgement(laws, seen)
            if judgement.first is not None:
                tensors: dict[str, Mapping[str, Tensor]] = {
                    "replicas-agree": probe.parameters,
                    "gradients-agree": {name: p.grad for name, p in probe.parameters.items() if p.grad is not None},
                    "buffers-agree": context.subject.buffers_by_name(),
                }
                _report(context, judgement, probe, context.scene_of(probe, aligned, applied=False), tensors)
            if in_lockstep(aligned):
                for check in checks:
                    check.judge(probe, self._said, aligned)

    def _pass_over(self, probe: OptimizerProbe, step: int) -> None:
        context, reports = self._context, self._context.check(LoopReports)
        with context.timed():
            probe.check(Weights).note_writes()
            values = self._interval(probe) | reports.meanwhile(probe)
            said = context.exchange(step, f"before {probe.number}", values, judged=True)
            self._adopt(said)
            seen: Seen[object] = Seen(said, None, context.subject.names)
            context.verdicts.judge((LOCKSTEP, *reports.before_laws), seen, context.scene())
            if in_lockstep(said):
                reports.judge(probe, said, self._aligned)

    def _interval(self, probe: OptimizerProbe) -> Values:
        pace, first = self._context.pace, probe is self._context.probes[0]
        return {"interval": pace.wanted(probe.made + 1, settled=self._settled) if first else 0}

    @property
    def _settled(self) -> bool:
        # A loop that reports its rows wants each of them judged with its update.
        return not self._reporting and all(p.check(Weights).synchrony.settled for p in self._context.probes)

    def _adopt(self, said: Observations) -> None:
        """Adopt the interval that the ranks need. All updates are read in full if ranks are not at the same point."""
        self._reporting = not in_lockstep(said) or any(o.values["rows"] for o in said) or self._reporting
        self._context.pace.agree([o.values["interval"] for o in said] if self._settled else [1])

    def after(self, probe: OptimizerProbe) -> None:
        """Start reading the state after an update. Judges it now (collective); with GPUs on all ranks, later."""
        context, full = self._context, probe.full
        with context.timed():
            probe.updates += 1
            probe.made += 1
            context.steps += 1
            if full:
                self._look_after(probe)
            probe.updated()
        if full and not self._late:
            self.judge_made()
        hooks_s = sum(each.check(Gradients).raw_hooks.host_seconds for each in context.probes)
        context.pace.updated(context.busy_s + hooks_s, context.added_s + hooks_s, full=full)

    def _look_after(self, probe: OptimizerProbe) -> None:
        context = self._context
        with context.pace.on_device():
            looks = [tensors for check in probe.checks for tensors in check.look_after(probe)]
        arrive = start_to_cpu(*looks)
        parts = [check.after(probe) for check in probe.checks]

        def values() -> Values:
            with context.waiting():
                arrive()
            return merged([part() for part in parts])

        self._unjudged = probe, values, context.rows.ids

    def judge_made(self) -> None:
        """Judge the last update if that was not done yet. Collective."""
        made, self._unjudged = self._unjudged, None
        if made is None:
            return
        context, (probe, values, ids) = self._context, made
        with context.timed():
            said = context.exchange(probe.updates, f"after {probe.number}", values(), judged=True)
            judgement = self._judge_after(probe, said)
            if judgement.first is not None:
                # If a difference of the weights is only a suspicion, its element is not searched for.
                tensors = {} if PARTED in judgement.laws else {"replicas-agree": probe.parameters}
                scene = context.scene_of(probe, self._aligned, applied=True)
                rows = context.rows
                later, rows.ids, rows.is_past = rows.ids, ids, self._late
                try:
                    _report(context, judgement, probe, scene, tensors)
                finally:
                    rows.ids, rows.is_past = later, False
            context.pace.agree([0] if self._settled else [1])
            self._note_equal(probe.updates, judgement.seen)
            probe.states_equal = "optimizer" not in judgement.seen.differing

    def _judge_after(self, probe: OptimizerProbe, said: Observations) -> Judgement[Seen[object]]:
        context, synchrony = self._context, probe.check(Weights).synchrony
        if context.settings.recording and self._said and in_lockstep(self._said) and in_lockstep(said):
            rows, draws = context.check(LoopReports).of_update, context.check(Mode).draws
            index = probe.number if len(context.probes) > 1 else None
            step = probe.updates if index is None else context.settings.start + context.steps
            context.recorder.step(self._said, said, rows, step=step, index=index, draws=draws)
        seen: Seen[object] = Seen(context.replicas.align(said), None, context.subject.names)
        waiting = synchrony.after(seen) if in_lockstep(said) else frozenset[str]()
        laws = [law for law in self._after_laws[probe] if law.clause not in waiting]
        return context.verdicts.judgement([*laws, PARTED] if synchrony.parted(seen.step) else laws, seen)

    def judge_last(self) -> str:
        """At the close: judge the last update if that was not done yet. Waits `_AT_THE_CLOSE_S` for the other ranks.

        Returns "", or the line that says why it was not judged.
        """
        made, self._unjudged = self._unjudged, None
        if made is None:
            return ""
        probe, values, _ = made
        try:
            point = f"after {probe.number}"
            said = self._context.exchange.gather_at_close(probe.updates, point, values(), _AT_THE_CLOSE_S)
        except (RuntimeError, OSError) as error:
            why = str(error) if isinstance(error, TimeoutError) else first_line(error)
            return f"  the state after update {probe.updates} was not compared: {why}"
        judgement = self._judge_after(probe, said)
        self._context.verdicts.report_alone(judgement, self._context.scene(applied=True), on_all_ranks=True)
        return ""

    def _note_equal(self, step: int, seen: Seen[object]) -> None:
        if self._context.replicas.any_held_twice and "weights" not in seen.differing:
            self._context.last_equal = step


def _report(
    context: Context,
    judgement: Judgement[Seen[object]],
    probe: OptimizerProbe | None,
    scene: Scene,
    tensors: Mapping[str, Mapping[str, Tensor]],
) -> None:
    exchange, verdicts, seen = context.exchange, context.verdicts, judgement.seen
    # Ranks at different points cannot be compared.
    if in_lockstep(seen.observations):
        details: dict[str, Mapping[str, Sequence[int]]] = {}
        for law in judgement.laws:
            for name in () if verdicts.is_reported(law.clause) else law.by_tensor:
                if name in seen.differing:
                    details.update(_details(context, name, seen.step, probe))
        judgement.seen = replace(seen, details=details)

    def locate(violation: Violation) -> Scene:
        """The scene with the first element that differs in the tensor of the finding. Collective."""
        # Some ranks may have no such gradient or optimizer state. They must take part in the gathers nevertheless.
        named, name, key = tensors.get(violation.clause), violation.tensor, ""
        if violation.clause == "optimizers-agree" and scene.applied and probe is not None:
            named = _states_of(probe, name) if name in probe.parameters else {}
            digests = exchange.gather_digests(seen.step, "state", named)
            name = key = next((one for one, by_rank in digests.items() if len(set(by_rank)) > 1), "")
        if named is None:
            return scene
        noun = "gradient" if violation.clause == "gradients-agree" else "tensor"
        # Of different parts of a model, elements cannot be compared.
        element = "" if context.replicas.cut else exchange.first_difference(seen.step, named.get(name), noun)
        return replace(scene, element=" ".join(filter(None, [key, element])))

    verdicts.report_all(judgement, scene, locate, {} if probe is None else {"ids": list(context.rows.ids)})


def _details(context: Context, name: str, step: int, probe: OptimizerProbe | None) -> Details:
    subject, look, spread = context.subject, context.exchange.gather_digests, context.exchange.gather_named
    parameters = subject.parameters if probe is None else probe.parameters
    details: dict[str, dict[str, tuple[int, ...]]] = {}
    if name == "weights":
        details[name] = look(step, name, parameters)
    elif name == "layout":
        layouts = {n: trainable_layout_digest({"": p}) for n, p in parameters.items()}
        details[name] = spread(step, "tensors of layout", layouts)
    elif name == "gradient":
        none = torch.empty(0, device="cpu")
        details[name] = look(step, name, {n: none if p.grad is None else p.grad for n, p in parameters.items()})
    elif name == "optimizer" and probe is not None:
        states = {n: state_digest(probe.optimizer.state.get(p, {})) for n, p in parameters.items()}
        details[name] = spread(step, "tensors of optimizer", states)
    elif name in ("buffers", "caches"):
        buffers = subject.buffers_by_name()
        details["buffers"] = look(step, "buffers", buffers)
        shapes = {n: layout_digest({"": buffer}) for n, buffer in buffers.items()}
        details["shapes of buffers"] = spread(step, "shapes of buffers", shapes)
    elif name == "modes":
        modes = {n or "the model": int(module.training) for n, module in subject.inner.named_modules()}
        return {name: spread(step, "modes of modules", modes)}
    elif name == "hyperparameters" and probe is not None:
        return {name: spread(step, name, hyperparameters_by_key(probe.optimizer))}
    # Buffers and whole tensors are replicas on all ranks.
    cut = {each for each, p in subject.parameters.items() if id(p) not in context.replicas.whole}
    align = context.replicas.aligned
    return {
        each: {tensor: align(row) if tensor in cut else row for tensor, row in table.items()}
        for each, table in details.items()
    }


def bundle_tensors(context: Context, named: str) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors for a bundle: those of the parameter `named`, then of all trained parameters, then buffers.

    They are called `weights NAME`, `gradient NAME`, `optimizer NAME KEY`, `buffer NAME`. Gradients and buffers are
    left out if they belong to a later update than the finding.
    """
    subject, probes, is_past = context.subject, context.probes, context.rows.is_past
    for names in ([named], [name for probe in probes for name in probe.names]):
        trained = [(probe, name) for probe in probes for name in names if name in probe.parameters]
        yield from ((f"weights {name}", plain(probe.parameters[name])) for probe, name in trained)
        gradients = [] if is_past else [(name, probe.parameters[name].grad) for probe, name in trained]
        yield from ((f"gradient {name}", plain(gradient)) for name, gradient in gradients if gradient is not None)
        for probe, name in trained:
            yield from ((f"optimizer {name} {key}", each) for key, each in _states_of(probe, name).items())
    if named in subject.frozen:
        yield f"weights {named}", plain(subject.frozen[named])
    if not is_past:
        yield from ((f"buffer {name}", plain(buffer)) for name, buffer in subject.buffers_by_name().items())


def _states_of(probe: OptimizerProbe, name: str) -> dict[str, Tensor]:
    state = probe.optimizer.state.get(probe.parameters[name], {})
    return {str(key): plain(value) for key, value in state.items() if isinstance(value, Tensor)}
