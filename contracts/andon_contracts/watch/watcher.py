"""An open watch: the methods that a loop calls, and the hooks on the model and the optimizers."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from andon_contracts.act import Evidence, end_at_user_line, write_cause
from andon_contracts.clauses import CLAUSES
from andon_contracts.legible import counted, log
from andon_contracts.liveness.diagnosis import AT_UPDATE, BEFORE_FORWARD, IN_PASS, EndMessages, Position
from andon_contracts.liveness.halt import HaltSignal, print_cause
from andon_contracts.record import LedgerFile
from andon_contracts.violation import Violation
from andon_contracts.watch.check import Context, Cover, OptimizerProbe, declared
from andon_contracts.watch.checks.gradients import Gradients
from andon_contracts.watch.checks.outcomes import Outcomes
from andon_contracts.watch.checks.reports import LoopReports
from andon_contracts.watch.checks.rows import LoadedRows
from andon_contracts.watch.checks.token_weights import LossPass
from andon_contracts.watch.checks.weights import Weights
from andon_contracts.watch.exchange import Exchange, Replicas
from andon_contracts.watch.intercept import Listener, listen, outside_of_transforms
from andon_contracts.watch.judging import Verdicts
from andon_contracts.watch.ledger import Recorder, reason_of
from andon_contracts.watch.model_probe import ForwardHook, ModelProbe, ModuleGroup
from andon_contracts.watch.pace import FULL
from andon_contracts.watch.settings import Settings
from andon_contracts.watch.updates import Updates, add_checks, bundle_tensors


class Watch:
    """An open watch; made by `andon.watch`. At the close, ranks may differ in `findings` and `violations`."""

    # One update, as seen from here. The loop calls the model: `_forward` raises if another rank halted the run, and
    # notifies the checks. `intercept` reports the loop's calls of backward, clip, all-reduce and data loaders;
    # `gradient_hooks` reads its gradients. When the loop calls the optimizer's step, `_before_step` judges the last
    # update if that waits for it (on GPUs). Then `Updates.before` lets every check read, gathers the values of all
    # ranks, and judges them: a broken law becomes a message, or an exception if `action` is "raise". `Check.deferred`
    # excepts clauses that only a later update can decide (weights that the loop has yet to average). After the step
    # `_after_step` calls `Updates.after`, which reads the new state and judges it, now or before the next update.

    def __init__(
        self,
        subject: ModelProbe,
        optimizers: Sequence[torch.optim.Optimizer],
        settings: Settings,
        exchange: Exchange,
        replicas: Replicas,
        halt: HaltSignal | None = None,
        ledger: LedgerFile | None = None,
    ) -> None:
        self.settings, self.closed = settings, False
        self._context = context = Context(subject, settings, exchange, replicas, halt)
        add_checks(context, optimizers)
        covers = {"halt-together": context.between_ranks(), "clip-once": declared(settings.clip, "clip=")}
        sharded = subject.sharded and settings.reference is None  # no use to advise it
        covers["gradient-law"] = Cover("not applicable") if sharded else declared(settings.reference, "reference=")
        for check in context.all_checks:
            covers |= check.cover()
        self._cover = {name: covers[name] for name in CLAUSES if name in covers}
        live = frozenset(name for name, cover in self._cover.items() if cover.live)
        context.recorder = Recorder(ledger, subject, replicated=not (replicas.mixed or subject.sharded))
        folder = None if settings.folder is None else Path(settings.folder)
        loaded, tensors = context.check(LoadedRows), partial(bundle_tensors, context)

        def ids() -> list[int]:  # as reported, else as loaded
            return context.rows.ids or ([] if context.rows.is_past else loaded.ids)

        evidence = Evidence(folder, exchange.rank, exchange.world_size, ids, tensors, subject.accelerators())
        context.verdicts = Verdicts(settings, live, record=context.recorder.violation, evidence=evidence)
        self._halt = halt
        if halt is not None:
            halt.evidence = evidence
            exchange.set_callbacks(lambda: halt.raise_if_halted(again=True), halt.lost, halt.pending)
        self._updates = Updates(context)
        # `_LoopCalls` is last: it clears `context.backward` after all checks have read it in `backward_over`.
        self.listeners: list[Listener] = [*context.all_checks, _LoopCalls(context, halt)]
        self._handled = sys.exc_info()[1]
        """The exception that the loop was already handling when the watch opened. It does not count as a failure."""
        self._last_error: BaseException | None = None
        self._undo: list[Callable[[], object]] = []
        self._say_opening()
        self._begin()

    def batch(self, ids: Sequence[int] | Tensor, content: Sequence[object] | None = None) -> None:
        """Report the rows that this rank is about to train on. Call it before each micro-batch.

        ids: [rows] integers. content: [rows] the model's input for each row, as tensors or plain values.
        Raises `ValueError` if ids or content have a wrong form, or the watch is closed.
        """
        self._demand_open()
        self._context.check(LoopReports).batch(ids, content)  # if it raises, no new micro-batch begins
        for probe in self._context.probes:
            probe.check(Gradients).raw_hooks.backward_seen = False

    def loss(self, loss: float | Tensor, count: int) -> None:
        """Report `loss`, the sum of the losses of `count` rows of this rank. Call it for each micro-batch."""
        self._demand_open()
        self._context.check(LoopReports).loss(loss, count)

    def expect(self, name: str, value: object, must: Literal["agree", "differ", "mean"]) -> None:
        """Report a value that the ranks compare before each update, until it is reported again. Call it on every rank.

        value: a tensor, array, `torch.Generator` or plain values (`random.getstate()`). must: "agree": equal on all
        ranks. "differ": different on each, as random states before a draw. "mean": a number, the mean of the losses
        passed to `loss` over the rows of all ranks; compared once.
        Raises `ValueError` for a fifth name, for another `must`, and for a value that cannot be compared.
        """
        self._demand_open()
        self._context.check(LoopReports).expect(name, value, must)

    def reduced(self) -> None:
        """For loops that clip without torch's functions: call it when gradients are reduced and unscaled, unclipped."""
        self._demand_open()
        for probe in self._context.probes:
            probe.reduced()

    def evaluated(
        self,
        ids: Sequence[int] | Tensor,
        predictions: Sequence[int] | Tensor,
        labels: Sequence[int] | Tensor,
        metrics: Mapping[str, float] | None = None,
        rows: int | None = None,
    ) -> None:
        """Report this rank's evaluated rows, and the loop's metrics (`accuracy` is recomputed). Collective.

        rows: the size of the evaluated data set. Raises `ValueError` on every rank if, on any rank, ids, predictions or
        labels are not integers or differ in length.
        """
        self._together()
        self._context.check(Outcomes).evaluated(ids, predictions, labels, metrics, rows)

    def saved(self, path: str | Path) -> None:
        """Report a checkpoint saved at `path`. Rank 0 writes `path`.andon.json: digests of the live state. Collective.

        Raises `OSError` on every rank if rank 0 cannot write.
        """
        self._together()
        self._context.check(Outcomes).saved(path)

    def loaded(self, path: str | Path) -> None:
        """Report that the checkpoint at `path` was loaded: compares the live state with that of its save. Collective.

        Sets the update counts to the saved ones. Raises `ValueError` on every rank if any cannot read the digests that
        `saved` wrote.
        """
        self._together()
        self._context.check(Outcomes).loaded(path)

    def pull(self, reason: str) -> NoReturn:
        """Stop all ranks: this one raises `Violation` now, the others at their next hook.

        A rank that is blocked in a collective is killed if `hard_stop` is set, else it ends by its own timeout.
        """
        self._demand_open()
        if self._halt is not None:
            self._halt.pull(reason)
        evidence, at = self._context.verdicts.evidence, Position(self._context.updates + 1)
        cause = EndMessages(0, 1, at, evidence.folder).pulled(reason)
        failed = write_cause(cause, evidence, vars(at), state=True, account=True)
        if failed:
            cause = cause.with_rows(("but", f"not all of the bundle could be written: {failed}"))
        raise cause.violation()

    @property
    def findings(self) -> tuple[Violation, ...]:
        """The violations and suspicions reported as causes, in order; their effects are in the message and ledger."""
        return tuple(self._context.verdicts.findings)

    @property
    def violations(self) -> int:
        """How often clauses were broken: repetitions and effects count, suspicions and silenced clauses do not."""
        return self._context.verdicts.counts.total()

    @property
    def evaluations(self) -> dict[str, int]:
        """By clause, how often it was evaluated."""
        return dict(self._context.verdicts.evaluations)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose updates are watched."""
        return [parameter for probe in self._context.probes for parameter in probe.members]

    def close(self) -> None:
        """Remove the hooks; print what was checked, how often, at what cost, and what was not. Not collective.

        If the loop ended without an error, judges what only the end shows: the last update (on GPUs; waits at most 5 s
        for the others), frozen weights, the number of updates. Raises `Violation` for these with `action="raise"`.
        """
        error = sys.exc_info()[1]
        self._close(self._last_error if error is None or error is self._handled else error)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and reason_of(error) != "finished" and self._halt is not None and not self.closed:
            self._halt.failed(error)
            print_cause(self._halt.cause, error)
        if isinstance(error, Violation):
            end_at_user_line(error)
        self._close(error)

    def _say_opening(self) -> None:
        covers, settings, subject = self._cover, self.settings, self._context.subject
        world, beside = self._context.world, len(subject.extra_tensors)
        live = sum(cover.live for cover in covers.values())
        table = "--verbose" if settings.by_command else "verbose=True"
        missing = dict.fromkeys(cover.remedy for cover in covers.values() if cover.remedy and not cover.live)
        whys = dict.fromkeys(c.why for c in covers.values() if c.state == "not observable" and not c.remedy)
        unseen = [f"{', '.join(n for n, c in covers.items() if c.why == why and not c.live)} ({why})" for why in whys]
        head = f"andon.watch: {world} rank{'s' * (world > 1)}, {len(subject.trainable)} trainable tensors"
        lines = [
            f"{head}; {live} of {len(covers)} clauses can be checked" + f", {table} lists them" * (not settings.verbose)
        ]
        lines += [f"  not watched: {', '.join(unseen)}"] * bool(unseen)
        if missing and not settings.by_command:
            lines.append(f"  more is checked with {' '.join(missing)}")
        if beside:
            tensors = f"{counted(beside, 'tensor')} in the optimizers that are not parameters of the model"
            lines.append(f"  not watched: the updates of {tensors}")
        if subject.sharded and world > 1 and not self._context.replicas.cut:
            lines.append("  not watched: shards and their states that change on one rank by no counted write of torch")
        if earlier := self._context.recorder.earlier:
            lines.append(f"  ledger {earlier}: the first update shows whether this run continues the one in it")
        if settings.verbose:
            width = max(map(len, covers))
            lines += [f"  {name:<{width}}  {cover.state:<14}  {cover.why}".rstrip() for name, cover in covers.items()]
        self._say(lines)

    # the hooks, in the order in which a step meets them

    def _begin(self) -> None:
        try:
            self._at(BEFORE_FORWARD)
            if self._halt is not None:
                self._halt.meet()  # ranks leave it at different times; the gather in `start` synchronizes them
            self._updates.start()
            self._at(BEFORE_FORWARD)
            self._hook()
        except BaseException as error:
            for undo in reversed(self._undo):
                undo()
            self._context.recorder.close(reason_of(error))
            self._context.exchange.close()
            if self._halt is not None:
                self._halt.end_with(type(error), error, None)
            raise

    def _hook(self) -> None:
        subject, pending = self._context.subject, None if self._halt is None else self._halt.pending
        for wrapper in subject.reducers:
            self._undo.append(wrapper.module.register_forward_pre_hook(ForwardHook(wrapper.forward)).remove)
        called = list(subject.inner.children()) if isinstance(subject.inner, ModuleGroup) else [subject.hooked_module]
        before, after = ForwardHook(self._forward, arguments=True), ForwardHook(self._forwarded)
        called += [scope.hooked_module for scope in subject.buffer_scopes]
        for module in {id(each): each for each in called}.values():
            self._undo.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            self._undo.append(module.register_forward_hook(after).remove)
        if pending is not None and not subject.forward_is_compiled:
            for each in pending.follow(subject.outer):
                self._undo.append(each.register_forward_pre_hook(ForwardHook(partial(pending.forward, each))).remove)
        for check in self._context.all_checks:
            self._undo += check.hooks()
        for probe in self._context.probes:
            self._undo.append(probe.optimizer.register_step_pre_hook(self._before_step).remove)
            self._undo.append(probe.optimizer.register_step_post_hook(self._after_step).remove)
        self._undo.append(listen(*self.listeners))
        atexit.register(self._leave, os.getpid())

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._raise_if_halted()
        self._at(IN_PASS)
        if not self._context.muted:
            with outside_of_transforms():
                for check in self._context.all_checks:
                    check.forward(module, args, kwargs)

    def _forwarded(self) -> None:
        if not self._context.muted:
            for check in self._context.all_checks:
                check.forwarded()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _within_a_step(optimizer):
            return None
        self._raise_if_halted(again=True)
        self._at(AT_UPDATE)
        probe = self._probe_of(optimizer)
        self._updates.judge_made()
        positional = len(args) > 1
        closure = args[1] if positional else kwargs.get("closure")
        if not callable(closure):  # a custom `step` may take another first argument
            self._updates.before(probe)
            return None
        probe.check(Weights).begin_step()
        waiting = [probe]

        def checked(*given: Any, **named: Any) -> Any:
            loss = closure(*given, **named)
            while waiting:
                self._updates.before(waiting.pop())
            return loss

        return ((args[0], checked, *args[2:]), kwargs) if positional else (args, {**kwargs, "closure": checked})

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _within_a_step(optimizer):
            return
        self._updates.after(self._probe_of(optimizer))
        self._at(BEFORE_FORWARD)

    def _probe_of(self, optimizer: torch.optim.Optimizer) -> OptimizerProbe:
        return next(probe for probe in self._context.probes if probe.optimizer is optimizer)

    def _at(self, point: str) -> None:
        if self._halt is not None:
            self._halt.at(self._context.updates + 1, point, self._context.last_equal)

    def _raise_if_halted(self, *, again: bool = False) -> None:
        if self._halt is not None:
            self._halt.raise_if_halted(again=again)

    def _together(self) -> None:
        self._demand_open()
        self._updates.judge_made()

    def _demand_open(self) -> None:
        if self.closed:
            raise ValueError("this watch is closed; call andon.watch again to open a new one")

    def _say(self, lines: Sequence[str]) -> None:
        if self._context.exchange.rank == 0:
            log(*filter(None, lines))

    # the end

    def _close(self, error: BaseException | None) -> None:
        """error: the exception that ended the loop; None if it finished."""
        if self.closed:
            return
        self.closed = True
        for undo in reversed(self._undo):
            undo()
        context, halt, reason, unread = self._context, self._halt, reason_of(error), ""
        try:
            if reason == "finished":
                unread = self._updates.judge_last()
        except BaseException as found:
            reason = reason_of(found)
            raise
        finally:
            if halt is not None:
                # The thread that found the cause of a halt must not write to the ledger. So this thread does it now.
                cause = halt.cause
                if cause is not None and not (cause.written or cause.clause in {each.clause for each in self.findings}):
                    context.recorder.violation(cause.violation(), "raised", False)
                halt.close()
            atexit.unregister(self._leave)
            try:
                if reason == "finished":
                    for check in context.all_checks:
                        check.judge_close()
            except BaseException as found:
                reason = reason_of(found)
                raise
            finally:
                context.exchange.close()
                context.recorder.close(reason)
                self._say_closing(unread)

    def _say_closing(self, unread: str) -> None:
        context, covers, verdicts, steps = self._context, self._cover, self._context.verdicts, self._context.steps
        waits = ", with its waits for other ranks" * (context.world > 1)
        early, *later = context.pace.cost() or ["no time, 0 ms"]
        split = "".join(f" in the first {FULL}, then {part}" for part in later)
        # Clauses for which the loop passed no values count as unchecked.
        unreported = context.check(LoopReports).unreported
        evaluated = {name: count for name, count in verdicts.evaluations.items() if count and name not in unreported}
        unchecked = [name for name in covers if name not in evaluated]
        findings = f"{counted(len(verdicts.counts), 'clause')} broken, {len(verdicts.suspected)} suspected"
        clauses = f"{len(covers) - len(unchecked)} of {len(covers)} clauses"
        times, able = counted(sum(evaluated.values()), "time"), sum(covers[name].live for name in unchecked)
        idle = f"{counted(len(unchecked), 'clause')}" + f" ({able} had no occasion)" * bool(able)
        table = f"{idle}, {'--verbose' if self.settings.by_command else 'verbose=True'} lists them"
        table = ", ".join(unchecked) if self.settings.verbose else table
        self._say(
            [
                f"andon.watch: {counted(steps, 'step')}, {clauses} were checked, {times} in all",
                f"  {findings}; the watch took {early} per step{split}{waits}",
                *verdicts.closing_lines(),
                f"  not checked: {table}" * bool(unchecked),
                *dict.fromkeys(line for check in context.all_checks for line in check.closing_lines()),
                unread,
                context.recorder.closing_line(),
                context.pace.closing_line(),
            ]
        )

    def _leave(self, pid: int) -> None:
        """Called when the interpreter exits: close the watch, but not in a forked child, whose parent continues."""
        if os.getpid() != pid:
            return
        self._last_error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        try:
            self.close()
        except Violation as found:
            # Python ignores an exception of an exit handler: it would not change the exit code.
            self._say([f"andon.Violation: {found}"])


class _LoopCalls(Listener):
    def __init__(self, context: Context, halt: HaltSignal | None) -> None:
        self._context, self._halt = context, halt

    def backward(self, loss: Tensor | None) -> None:
        if not self._context.muted:
            self._context.backward = LossPass(loss, self._context.full)

    def backward_over(self) -> None:
        self._context.backward = None

    def updates_of(self, optimizer: object) -> int | None:
        return next((probe.updates for probe in self._context.probes if probe.optimizer is optimizer), None)

    def skipped(self, optimizer: object) -> None:
        next(probe for probe in self._context.probes if probe.optimizer is optimizer).skip()

    def reducing(self, tensor: Tensor, group: object, waits: bool) -> None:
        if self._halt is not None:
            self._halt.pending.reducing(group, waits=waits)

    def resumed(self) -> None:
        if self._halt is not None:
            self._halt.pending.resumed()

    def lost(self, error: BaseException) -> None:
        if self._halt is not None:
            self._halt.lost(error)


def _within_a_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether another `step` of the same optimizer called this one, as a subclass calls its parent's."""
    # Torch wraps the `step` of each class, so the hooks may run twice. After an exception, a counter would be wrong.
    frame = sys._getframe(2)
    wrapper, outer = frame.f_code, frame.f_back
    while outer is not None:
        if outer.f_code is wrapper and outer.f_locals.get("self") is optimizer:
            return True
        outer = outer.f_back
    return False
