"""An open watch: its hooks on a model and its optimizers, and what a loop can tell it."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from andon_contracts.bundle import Evidence, write_cause
from andon_contracts.ledger import LedgerFile
from andon_contracts.legible import tell
from andon_contracts.liveness.end_messages import POINTS, Teller, Whereabouts
from andon_contracts.liveness.halt import HaltSignal, say_cause
from andon_contracts.violation import Violation
from andon_contracts.watch.coverage import closing_lines, coverage, opening_lines, port_warning
from andon_contracts.watch.exchange import Exchange
from andon_contracts.watch.gradient_scale import Passes
from andon_contracts.watch.intercept import Hearing, listen
from andon_contracts.watch.judging import Verdicts
from andon_contracts.watch.ledger import Recorder, reason_of
from andon_contracts.watch.locate import REPLICATED, tensors_of
from andon_contracts.watch.model_probe import ForwardTap, ModelProbe
from andon_contracts.watch.optimizer_probe import OptimizerProbe
from andon_contracts.watch.replicas import Replicas
from andon_contracts.watch.rows import Rows
from andon_contracts.watch.settings import Settings
from andon_contracts.watch.updates import Updates


class Watch:
    """An open watch; made by `andon.watch`. `findings` are the violations and suspicions so far, equal on all ranks."""

    def __init__(
        self,
        subject: ModelProbe,
        optimizers: Sequence[torch.optim.Optimizer],
        settings: Settings,
        exchange: Exchange,
        replicas: Replicas,
        cord: HaltSignal | None = None,
        ledger: LedgerFile | None = None,
    ) -> None:
        self.settings, self.closed = settings, False
        self._subject = subject
        self._exchange = exchange
        self._cord, self._begun = cord, None if cord is None else cord.begun
        exchange.alike = not replicas.cut
        self._cover = coverage(subject, optimizers, settings, exchange.world_size, replicas)
        live = frozenset(name for name, cover in self._cover.items() if cover.live)
        absent = {name for name, clause in REPLICATED.items() if self._cover[clause].state == "not applicable"}
        held = {name: not replicas.cut and name not in absent for name in REPLICATED}
        self._recorder = Recorder(ledger, subject, held)
        self._last_error: BaseException | None = None
        self._rows, world, passes = Rows(), exchange.world_size, Passes()
        probes = [OptimizerProbe(each, subject, settings, self._rows, world, passes) for each in optimizers]
        self._probes = {id(each.optimizer): each for each in probes}
        evidence = _evidence(settings, exchange, self._rows, subject, probes)
        self._verdicts = Verdicts(
            settings, exchange.rank, subject.names, live, record=self._recorder.violation, evidence=evidence
        )
        if cord is not None:
            cord.evidence = evidence
            exchange.attend(lambda: cord.heed(again=True), cord.lost, cord.begun)
        self._updates = Updates(subject, probes, exchange, replicas, self._verdicts, self._recorder, self._rows)
        self._reports, self._outcomes = self._updates.reports, self._updates.outcomes
        self.hearing = Hearing(self._probes, cord, self._updates.practice, passes)
        self._undo: list[Callable[[], object]] = []
        beside = len(subject.beside)
        self._say(opening_lines(self._cover, exchange.world_size, len(subject.trainable), settings, beside))
        self._begin()

    def _begin(self) -> None:
        """Acquaintance with the other ranks, the first look, and the hooks; an error in it leaves nothing open."""
        try:
            self._at(0)
            if self._cord is not None:
                self._cord.meet()  # takes some ranks longer: what follows is a gather, and all leave that together
            self._updates.start()
            self._at(0)
            self._hook()
        except BaseException as error:
            for undo in reversed(self._undo):
                undo()
            for probe in self._probes.values():
                probe.close()
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

    @property
    def violations(self) -> int:
        """How many findings so far are violations: neither suspicions nor silenced."""
        return self._verdicts.counts.total()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose updates are watched."""
        return [parameter for probe in self._probes.values() for parameter in probe.parameters.values()]

    def batch(self, ids: Sequence[int] | Tensor, content: Sequence[object] | None = None) -> None:
        """The rows that this rank is about to train on; once for each micro-batch.

        ids: [rows] integers. content: [rows] what the model is given for each, tensors or values.
        Raises `ValueError` for ids or content of a wrong form, and on a closed watch.
        """
        self._demand_open()
        self._reports.batch(ids, content)  # what it refuses is no new micro-batch
        for probe in self._probes.values():
            probe.taps.backward_seen = False

    def loss(self, loss: float | Tensor, count: int, reported: float | None = None) -> None:
        """loss: the sum over `count` rows of this rank; reported: what the loop logs as the mean loss of the update."""
        self._demand_open()
        self._reports.loss(loss, count, reported)

    def reduced(self) -> None:
        """The gradients are reduced and unscaled now, and not clipped yet; for loops that clip by hand."""
        self._demand_open()
        for probe in self._probes.values():
            probe.reduced()

    def rng(self, name: str, must: Literal["differ", "agree"], state: object = None) -> None:
        """A random stream that must differ between ranks, or agree; tell it before anything is drawn from it.

        state: a tensor, array, `torch.Generator` or plain values (`random.getstate()`); None: torch's on the CPU.
        Raises `ValueError` for a fifth stream, for another word than "differ" and "agree", and for a state that holds
        what cannot be compared.
        """
        self._demand_open()
        self._reports.rng(name, must, state)

    def evaluated(
        self,
        ids: Sequence[int] | Tensor,
        predictions: Sequence[int] | Tensor,
        labels: Sequence[int] | Tensor,
        metrics: Mapping[str, float] | None = None,
        rows: int | None = None,
    ) -> None:
        """What this rank evaluated, and the metrics that the loop reports (`accuracy` is recounted). Collective.

        Raises `ValueError` on every rank where any rank's ids, predictions and labels do not go together.
        """
        self._together()
        self._outcomes.evaluated(ids, predictions, labels, metrics, rows)

    def saved(self, path: str | Path, read: Callable[[], Mapping[str, Tensor]] | None = None) -> None:
        """A checkpoint was saved at `path`: digests of all that is live go to `path`.andon.json. Collective.

        read: gives what is on the disk by parameter name, to be held to what is live.
        Raises `OSError` on every rank where the disk refuses; where `read` raises on any rank, that on this one, and
        `ValueError` on the others.
        """
        self._together()
        self._outcomes.saved(path, read)

    def loaded(self, path: str | Path) -> None:
        """The checkpoint at `path` was loaded: all that is live is what was live at its save. Collective.

        Raises `ValueError` on every rank where the save was not told to a watch, or a rank cannot read what was.
        """
        self._together()
        self._outcomes.loaded(path)

    def _demand_open(self) -> None:
        if self.closed:
            raise ValueError("this watch is closed")

    def _together(self) -> None:
        """All ranks are here: what waited for that is judged."""
        self._demand_open()
        self._updates.judge_made()

    def _say(self, lines: Sequence[str]) -> None:
        if self._exchange.rank == 0:
            tell(*filter(None, lines))

    def _hook(self) -> None:
        called = self._subject.called
        for number, home in enumerate(self._subject.homes):
            tap = ForwardTap(partial(self._forward, number))
            self._undo.append(home.called.register_forward_pre_hook(tap).remove)
        for wrapper in self._subject.reducers:
            self._undo.append(wrapper.module.register_forward_pre_hook(ForwardTap(wrapper.forward)).remove)
        self._undo += self._updates.auditor.hooks(called) + self._updates.practice.hooks()
        if self._begun is not None and not self._subject.begins_unseen:
            for each in self._begun.follow(self._subject.outer):
                tap = ForwardTap(partial(self._begun.forward, each))
                self._undo.append(each.register_forward_pre_hook(tap).remove)
        for probe in self._probes.values():
            self._undo.append(probe.optimizer.register_step_pre_hook(self._pre).remove)
            self._undo.append(probe.optimizer.register_step_post_hook(self._post).remove)
            probe.taps.cord = self._cord
            self._undo.append(probe.close)
            self._undo.append(_intercept_zero(probe, self._rows))
        self._undo.append(listen(self.hearing))
        atexit.register(self._leave)

    def pull(self, reason: str) -> NoReturn:
        """Stop all ranks, whatever they are doing: this one raises `Violation` now, the others at their next hook.

        A rank that is blocked in a collective is ended with `hard_stop`, otherwise by its own timeout.
        """
        self._demand_open()
        if self._cord is not None:
            self._cord.pull(reason)
        evidence, at = self._verdicts.evidence, Whereabouts(self._updates.made + 1)
        cause = Teller(0, 1, at, evidence.folder).pulled(reason)
        failed = write_cause(cause, evidence, vars(at), state=True, account=True)
        if failed:
            cause = cause.with_rows(("but", f"not all of the bundle could be written: {failed}"))
        raise cause.violation()

    def _at(self, place: int) -> None:
        """Where this rank is within its step, for those who would miss it."""
        if self._cord is not None:
            self._cord.at(self._updates.made + 1, POINTS[place], self._updates.locator.last_equal)

    def _heed(self, *, again: bool = False) -> None:
        """Raise what another rank pulled the cord for."""
        if self._cord is not None:
            self._cord.heed(again=again)

    def _pre(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _within_a_step(optimizer):
            return None
        self._heed(again=True)
        self._at(2)
        probe = self._probes[id(optimizer)]
        self._updates.judge_made()
        positional = len(args) > 1
        closure = args[1] if positional else kwargs.get("closure")
        if not callable(closure):  # what a `step` of the loop's own takes in its place
            self._updates.before(probe)
            return None
        probe.begin_step()
        waiting = [probe]

        def checked(*given: Any, **named: Any) -> Any:
            loss = closure(*given, **named)
            while waiting:
                self._updates.before(waiting.pop())
            return loss

        return ((args[0], checked, *args[2:]), kwargs) if positional else (args, {**kwargs, "closure": checked})

    def _forward(self, home: int) -> None:
        self._heed()
        self._at(1)
        self._updates.forward(home)

    def _post(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _within_a_step(optimizer):
            return
        self._updates.after(self._probes[id(optimizer)])
        self._at(0)

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
        reason = reason_of(sys.exc_info()[1] or self._last_error)
        unread: list[str] = []
        try:
            if reason == "finished":
                unread.append(self._updates.judge_last())
        finally:
            self._close(reason, unread)

    def _close(self, reason: str, unread: list[str]) -> None:
        if self._cord is not None:
            # What stopped the loop from elsewhere is written down here, where no line is being written.
            cause = self._cord.cause
            if cause is not None and not (cause.written or cause.clause in {each.clause for each in self.findings}):
                self._recorder.violation(cause.violation(), "raised", False)
            self._cord.close()
        atexit.unregister(self._leave)
        try:
            if reason == "finished":
                unread += self._updates.judge_parted()
                unread.append(self._updates.judge_base())
                self._outcomes.judge_count(self._updates.made, over=True)
                self._updates.practice.judge_close()
        finally:
            self._exchange.close()
            self._recorder.close(reason)
            steps, spent = self._updates.steps, self._updates.spent()
            lines = closing_lines(self._cover, self._verdicts, steps, spent, self._reports.untold)
            self._say([*lines, *self._updates.lines(), *unread, self._recorder.closing_line(), port_warning()])

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
        if error is not None and reason_of(error) != "finished" and self._cord is not None and not self.closed:
            self._cord.failed(error)
            say_cause(self._cord.cause, error)
        self.close()


def _evidence(
    settings: Settings, exchange: Exchange, rows: Rows, subject: ModelProbe, probes: Sequence[OptimizerProbe]
) -> Evidence:
    """What this rank has for a bundle."""
    return Evidence(
        None if settings.folder is None else Path(settings.folder),
        exchange.rank,
        exchange.world_size,
        lambda: list(rows.ids),
        lambda named: tensors_of(subject, probes, named, gone_on=rows.gone_on),
        subject.accelerators(),
    )


def _within_a_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step at hand was called by another step of the same optimizer, as a subclass calls its parent's."""
    # Torch wraps the `step` of every class that an optimizer was made of. The stack says it after an error too.
    frame = sys._getframe(2)
    wrapper, outer = frame.f_code, frame.f_back
    while outer is not None:
        if outer.f_code is wrapper and outer.f_locals.get("self") is optimizer:
            return True
        outer = outer.f_back
    return False


def _intercept_zero(probe: OptimizerProbe, rows: Rows) -> Callable[[], None]:
    """See when the gradients of `probe`'s optimizer are thrown away; what ends it."""
    optimizer = probe.optimizer
    original, own = optimizer.zero_grad, vars(optimizer).get("zero_grad")
    watching = [True]

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        # Who kept this function calls it after the watch was closed, too.
        if watching[0]:
            if probe.taps.backward_seen:
                rows.spent()
            probe.discard()

    def put_back() -> None:
        watching[0] = False
        # What the loop itself set, before or since, stays.
        if vars(optimizer).get("zero_grad") is zero_grad:
            del vars(optimizer)["zero_grad"]
            vars(optimizer).update({} if own is None else {"zero_grad": own})

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return put_back
