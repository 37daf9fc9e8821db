"""The watch itself: hooks on a model and its optimizers, and the two gathers of a step."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from andon_contracts.act import Scene
from andon_contracts.agree import Observation
from andon_contracts.bundle import Evidence, write_cause
from andon_contracts.causes import Cause
from andon_contracts.ends import POINTS, Teller, Whereabouts
from andon_contracts.halt import Cord
from andon_contracts.judge import Observations, in_lockstep
from andon_contracts.ledger import LedgerFile
from andon_contracts.loop_clauses import judge_frozen, same
from andon_contracts.violation import Violation
from andon_contracts.watch.auditing import Auditor
from andon_contracts.watch.base import Buffers, FrozenBase
from andon_contracts.watch.coverage import closing_lines, coverage, opening_lines
from andon_contracts.watch.evidence import tensors_of
from andon_contracts.watch.exchange import Exchange
from andon_contracts.watch.forward import ForwardTap
from andon_contracts.watch.hearing import Hearing
from andon_contracts.watch.intercept import listen, unlisten
from andon_contracts.watch.judging import AFTER, BEFORE, Verdicts
from andon_contracts.watch.lane import Lane
from andon_contracts.watch.ledger import Recorder, Told, reason_of
from andon_contracts.watch.reading import Reader, layout_digest
from andon_contracts.watch.replicas import Replicas
from andon_contracts.watch.rows import Rows
from andon_contracts.watch.second_look import REPLICATED, SecondLook
from andon_contracts.watch.settings import Settings
from andon_contracts.watch.subject import Subject
from andon_contracts.watch.telling import Telling


class Watch(Telling, Hearing):
    """An open watch; made by `andon.watch`. `findings` are the violations and suspicions so far, equal on all ranks."""

    def __init__(
        self,
        subject: Subject,
        optimizers: Sequence[torch.optim.Optimizer],
        settings: Settings,
        exchange: Exchange,
        replicas: Replicas,
        cord: Cord | None = None,
        ledger: LedgerFile | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.closed = False
        self._subject = subject
        self._exchange = exchange
        self._cord, self._begun = cord, None if cord is None else cord.begun
        self._replicas, exchange.alike = replicas, not replicas.cut
        self._cover = coverage(subject, optimizers, settings, exchange.world_size, replicas)
        live = frozenset(name for name, cover in self._cover.items() if cover.live)
        absent = {name for name, clause in REPLICATED.items() if self._cover[clause].state == "not applicable"}
        held = {name: not replicas.cut and name not in absent for name in REPLICATED}
        self._recorder = Recorder(ledger, subject, held)
        self._seen_before: Observations = ()
        self._aligned: Observations = ()
        self._last_error: BaseException | None = None
        self._rows = Rows()
        evidence = self._evidence()
        self._verdicts = Verdicts(
            settings, exchange.rank, subject.names, live, record=self._recorder.violation, evidence=evidence
        )
        if cord is not None:
            cord.evidence = evidence
            exchange.attend(lambda: cord.heed(again=True), cord.lost, cord.begun)
        world = exchange.world_size
        self._lanes = {id(each): Lane(each, subject, settings, self._rows, world) for each in optimizers}
        self._auditor = Auditor(exchange, self._verdicts, self._rows, list(self._lanes.values()))
        self._second_look = SecondLook(exchange, replicas, self._verdicts, subject, self._rows)
        self._before_holds = self._verdicts.quick(BEFORE)
        self._after_holds = self._verdicts.quick(AFTER)
        self._base = FrozenBase(list(subject.frozen.values()))
        self._buffers = Buffers()
        self._began = time.perf_counter()
        self._spent = 0.0
        self._steps = 0
        self._unread = ""
        self._undo: list[Callable[[], object]] = []
        self._say(opening_lines(self._cover, exchange.world_size, len(subject.trainable)))
        self._begin()

    def _begin(self) -> None:
        """Acquaintance with the other ranks, the first look, and the hooks; an error in it leaves nothing open."""
        try:
            self._at(0)
            if self._cord is not None:
                self._cord.meet()  # takes some ranks longer: what follows is a gather, and all leave that together
            self._start()
            self._hook()
        except BaseException as error:
            for undo in reversed(self._undo):
                undo()
            for lane in self._lanes.values():
                lane.close()
            self._recorder.close(reason_of(error))
            self._exchange.close()
            if self._cord is not None:
                self._cord.end_with(type(error), error, None)
            raise

    @property
    def findings(self) -> tuple[Violation, ...]:
        """What did not hold so far: the first finding of each clause."""
        return tuple(self._verdicts.findings)

    @property
    def evaluations(self) -> dict[str, int]:
        """How often each clause was evaluated."""
        return dict(self._verdicts.evaluations)

    def _evidence(self) -> Evidence:
        folder = None if self.settings.folder is None else Path(self.settings.folder)
        return Evidence(
            folder,
            self._exchange.rank,
            self._exchange.world_size,
            lambda: list(self._rows.ids),
            lambda named: tensors_of(self._subject, list(self._lanes.values()), named),
            self._subject.accelerators(),
        )

    def _say(self, lines: Sequence[str]) -> None:
        if self._exchange.rank == 0:
            print("\n".join(lines), file=sys.stderr, flush=True)

    def _hook(self) -> None:
        called = self._subject.called
        self._undo.append(called.register_forward_pre_hook(ForwardTap(self._forward)).remove)
        self._undo += self._auditor.hooks(called)
        if self._begun is not None and not self._subject.begins_unseen:
            for each in self._begun.follow(self._subject.outer):
                tap = ForwardTap(partial(self._begun.forward, each))
                self._undo.append(each.register_forward_pre_hook(tap).remove)
        for lane in self._lanes.values():
            self._undo.append(lane.optimizer.register_step_pre_hook(self._pre).remove)
            self._undo.append(lane.optimizer.register_step_post_hook(self._post).remove)
            lane.taps.cord = self._cord
            self._undo.append(lane.close)
            self._intercept_zero(lane)
        listen(self)
        self._undo.append(self._unlisten)
        atexit.register(self._leave)

    def _unlisten(self) -> None:
        unlisten(self)

    def _intercept_zero(self, lane: Lane) -> None:
        optimizer = lane.optimizer
        original, own = optimizer.zero_grad, vars(optimizer).get("zero_grad")

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if self.closed:
                return
            if lane.taps.backward_seen:
                self._rows.spent()
            lane.discard()

        def put_back() -> None:
            # What the loop itself set, before or since, stays.
            if vars(optimizer).get("zero_grad") is zero_grad:
                del vars(optimizer)["zero_grad"]
                vars(optimizer).update({} if own is None else {"zero_grad": own})

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        self._undo.append(put_back)

    def _start(self) -> None:
        subject = self._subject
        self._exchange.connect()
        portable = self._devices_differ()
        low = [i for i, slot in enumerate(subject.slots) if slot.trainable and slot.parameter.element_size() < 4]
        values = {
            "change": subject.fault_at_start(),
            "layout": layout_digest(subject.parameters),
            "weights": Reader(portable=portable).read(list(subject.parameters.values())).digest,
            "imprecise": low[0] + 1 if low else 0,
        }
        observations = self._replicas.align(self._exchange(0, "start", values, judged=True))
        optimizers = [lane.optimizer for lane in self._lanes.values()]
        self._recorder.opened(self._exchange.world_size, optimizers, self.settings.rows, self.settings.start)
        if self._second_look.start(observations):
            self._second_look.note_equal(self.settings.start, observations)
            self._at(0)
        self._look_at_data()

    def _devices_differ(self) -> bool:
        """Whether replicas are on different kinds of devices; if so, their digests are made comparable. Collective."""
        kinds = {parameter.device.type for parameter in self._subject.parameters.values()}
        differ = not same(self._exchange(0, "devices", {"on the CPU": int(kinds == {"cpu"})}), "on the CPU")
        self._buffers.portable(differ)
        for lane in self._lanes.values():
            lane.portable(differ)
        return differ

    def pull(self, reason: str) -> NoReturn:
        """Stop all ranks, whatever they are doing: this one raises `Violation` now, the others at their next hook.

        A rank that is blocked in a collective is ended with `hard_stop`, otherwise by its own timeout.
        """
        self._demand_open()
        if self._cord is not None:
            self._cord.pull(reason)
        evidence, at = self._verdicts.evidence, Whereabouts(self._now())
        cause = Teller(0, 1, at, evidence.folder).pulled(reason)
        failed = write_cause(cause, evidence, vars(at), state=True, account=True)
        if failed:
            cause = cause.with_rows(("but", f"not all of the bundle could be written: {failed}"))
        raise cause.violation()

    def _now(self) -> int:
        return max(lane.updates for lane in self._lanes.values()) + 1

    def _at(self, place: int) -> None:
        """Where this rank is within its step, for those who would miss it."""
        if self._cord is not None:
            self._cord.at(self._now(), POINTS[place], self._second_look.last_equal)

    def lost(self, error: BaseException) -> None:
        """A reduction of the loop failed."""
        if self._cord is not None:
            self._cord.lost(error)

    def _heed(self, *, again: bool = False) -> None:
        """Raise what another rank pulled the cord for."""
        if self._cord is not None:
            self._cord.heed(again=again)

    def _forward(self) -> None:
        self._heed()
        self._at(1)
        if not torch.is_grad_enabled():
            self._norm_in_training = self._subject.norm_in_training()
        if "buffers-agree" not in self._verdicts.live or not torch.is_grad_enabled():
            return
        lanes = [lane for lane in self._lanes.values() if not lane.taps.started]
        if not lanes or any(lane.taps.muted for lane in lanes):
            return
        began = time.perf_counter()
        digest = self._buffers.digest(self._subject.buffers(), self._now())
        for lane in lanes:
            lane.buffers = digest
        self._spent += time.perf_counter() - began

    def _pre(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._heed(again=True)
        self._at(2)
        lane = self._lanes[id(optimizer)]
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._before(lane)
            return None
        waiting = [lane]

        def checked() -> Any:
            loss = closure()
            while waiting:
                self._before(waiting.pop())
            return loss

        return ((args[0], checked), {}) if args else (args, {**kwargs, "closure": checked})

    def _post(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        began = time.perf_counter()
        lane = self._lanes[id(optimizer)]
        values = lane.after()
        self._steps, self._norm_in_training = self._steps + 1, 0
        seen = self._exchange(lane.updates, f"after {self._number(lane)}", values, judged=True)
        self._record(lane, seen)
        observations = self._replicas.align(seen)
        if not self._after_holds(observations):
            self._second_look.after(lane, observations, self._aligned)
        self._second_look.note_equal(lane.updates, observations)
        lane.moments_equal = same(observations, "optimizer")
        self._at(0)
        lane.turn()
        self._spent += time.perf_counter() - began

    def _record(self, lane: Lane, after: Observations) -> None:
        if not self.settings.recording or not self._seen_before:
            return
        if not (in_lockstep(self._seen_before) and in_lockstep(after)):
            return
        several = len(self._lanes) > 1
        step = self.settings.start + self._steps if several else lane.updates
        index = self._number(lane) if several else None
        self._recorder.step(self._seen_before, after, self._told_rows, step=step, index=index)

    def _number(self, lane: Lane) -> int:
        return list(self._lanes).index(id(lane.optimizer))

    def _before(self, lane: Lane) -> None:
        began = time.perf_counter()
        step = lane.updates + 1
        values = {**lane.before(), **self._told(), "base": self._base.digest(), "first base": self._base.first}
        self._seen_before = self._exchange(step, f"before {self._number(lane)}", values, judged=True)
        observations = self._aligned = self._replicas.align(self._seen_before)
        self._told_rows = Told()
        if not self._before_holds(observations):
            self._second_look.before(lane, observations)
        if in_lockstep(observations):
            self._judge_count(lane.updates, over=False)
            ids = self._judge_rows(observations, lane.skipped)
            self._auditor(lane, step, ids, lambda: self._second_look.scene(lane, observations, applied=False))
        self._spent += time.perf_counter() - began

    def close(self) -> None:
        """Take every hook off and say what was checked, how often, at what cost, and what was not. Not collective.

        The frozen weights are read once more. Raises `Violation`, where the action is to raise, if one changed or fewer
        updates were made than planned.
        """
        if self.closed:
            return
        self.closed = True
        for undo in reversed(self._undo):
            undo()
        if self._cord is not None:
            self._record_cause(self._cord.cause)
            self._cord.close()
        atexit.unregister(self._leave)
        whole = time.perf_counter() - self._began
        spent = self._spent + sum(lane.taps.spent for lane in self._lanes.values())
        reason = reason_of(sys.exc_info()[1] or self._last_error)
        try:
            if reason == "finished":
                self._judge_base()
                self._judge_count(max(lane.updates for lane in self._lanes.values()), over=True)
        finally:
            self._exchange.close()
            self._recorder.close(reason)
            lines = closing_lines(
                self._cover, self._verdicts, self._steps, spent / whole if whole else 0.0, self._untold
            )
            self._say([*lines, *filter(None, [self._unread, self._recorder.closing_line()])])

    def _judge_base(self) -> None:
        """Read all frozen weights once more, and hold them to the start: this rank alone, because a close is.

        Where the model was changed after its last update, by a merge or a load, they may rightly be others.
        """
        clause, updates = "base-frozen", max(lane.updates for lane in self._lanes.values())
        if clause not in self._verdicts.live or self._verdicts.known(clause) or not self._steps:
            return
        touched = not (self._base.untouched and all(lane.untouched for lane in self._lanes.values()))
        why = "weights were written after the last update" if touched else self._subject.became()
        if why:
            self._unread = f"  base-frozen: not read once more at the end, because {why}"
            return
        values = {"base": self._base.last_look(), "first base": self._base.first}
        seen = (Observation(self._exchange.rank, updates, 0, "close", values),)
        self._verdicts.evaluations[clause] += 1
        try:
            judge_frozen(seen, {}, self._subject.names)
        except Violation as found:
            self._verdicts.take(found, Scene(self._exchange.world_size, applied=True), alone=True)

    def _record_cause(self, cause: Cause | None) -> None:
        """What stopped the loop from elsewhere goes into the ledger here, where no line is being written."""
        if cause is not None and not cause.written and cause.clause not in {found.clause for found in self.findings}:
            self._recorder.violation(cause.violation(), "raised", False)

    def _leave(self) -> None:
        """The interpreter ends, whatever ended it."""
        self._last_error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        try:
            self.close()
        except Violation as found:
            # An error here would neither end the process otherwise nor be shown as what it is.
            self._say([f"andon.Violation: {found}"])

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self._cord is not None and not self.closed:
            self._cord.failed(error)
        self.close()
