"""The step: plan, compute, report, reduce, report, apply, report. One code path for every backend.

`TrainingStep.launch` is the overview. The decorators of each phase name its laws, which are judged on what the phase
reports, after it has run; their conditions stand in `andon_contracts.laws.update`, their clauses in `clauses`.

    phase               contract                        laws (evaluated first to last)
    _compute            C-DP-002, F-DP-002, F-DP-003    ROWS_AGREE, then LEAVES (each once, as planned, finite)
    _audit_gradients    audit                           AUDITED
    _reduce_gradient    C-DP-001, F-DP-003              RATE, WEIGHTS_UNCHANGED; GRADIENTS_AGREE, FINITE, CLIP
    _compare_slices     C-DP-001, divided optimizer     GRADIENT_KEPT, MOMENTS_KEPT
    _compare_moments    C-DP-001, one rank alone        OPTIMIZER_UNCHANGED (several: after the update)
    _apply_update       C-DP-001, F-DP-001              ONE_UPDATE, OPTIMIZERS, REPLICAS
    mean_loss           F-DP-005                        its own condition, when the result is read
    F-DP-004, devices without a GPU, is on `backend.devices.placement`.

To read a value from a GPU, the host waits for all earlier work, and then the GPU idles until the host has caught up. So
if all replicas are on GPUs, values are copied to pinned memory after the work that computes them and read a step later.
`Pending` is such an update.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from andon.backend.base import Backend
from andon.config.schema import Contracts
from andon.step import message
from andon.step.agreement import Agreement, Gathered, RankFailed, Report, Tensors, ensures, requires
from andon.step.audit import NO_AUDIT, UPDATE_AUDITED, Audit
from andon.step.flat import moments_of
from andon.step.message import COMPUTED, EACH_ONCE, PARTS_FINITE, REDUCED, ROWS_AGREE, ROWS_PLANNED, TERMS_PLANNED, Gate
from andon.step.micro_batch import Leaf, Task, plan_leaves
from andon.step.plan import GlobalBatch, rank_leaves
from andon.step.reduce import TreeReduction, fold
from andon.step.replica import PartialGradient, Replica
from andon.step.slices import SliceExchange
from andon_contracts.agree import HEADER, Observation, bits_of, real_of
from andon_contracts.digest import signed
from andon_contracts.laws import update as laws
from andon_contracts.laws.law import LOCKSTEP, Details, Rule, Seen, in_lockstep
from andon_contracts.laws.update import LeafPlan, LeafReport, Leaves
from andon_contracts.observe import word_sums
from andon_contracts.policy import clause, enforced, ensure
from andon_contracts.violation import Finding

__all__ = ["Pending", "RankFailed", "StepResult", "TrainingStep"]

UNSIGNED = 1 << 64
_PLAIN_WIDTH = 32  # a message's integers besides the reports: its header and its values, with room to spare
_LOSS_TOLERANCE = 0.01  # of F-DP-005; the falsifier compares whole runs, to the bit
_COMPARED: Mapping[str, Callable[[Replica], Tensors]] = {
    "gradient": Replica.reduced_gradient,
    "weights": lambda replica: replica.parameters.weight_views(),
    "optimizer": Replica.optimizer_state,
    "base": Replica.frozen,
}
"""The tensors of each digested value, which ranks compare one by one to explain a violation."""


def reads_late(backend: Backend) -> bool:
    """True if all replicas of `backend` are on GPUs: values are then read a step later."""
    # In `mixed`, messages go through the CPU and are read immediately.
    return backend.name != "mixed" and all(device.type == "cuda" for device in backend.devices)


def _plain_mean(losses: Sequence[float], terms: int) -> float:
    return math.fsum(losses) / max(terms, 1)


def _explain_loss(losses: Sequence[float], terms: int, step: int, result: float) -> Finding:
    what = f"the loss is {result!r}, the loss sums of all micro-batches give {_plain_mean(losses, terms)!r}"
    return Finding(what, step, (), "loss")


@clause("loss-equivalent", _explain_loss)
def _loss_is_that_of_one_process(losses: Sequence[float], terms: int, step: int, result: float) -> bool:
    off = abs(result - _plain_mean(losses, terms))
    return off <= _LOSS_TOLERANCE * _plain_mean([abs(loss) for loss in losses], terms)


@ensure(_loss_is_that_of_one_process)
def mean_loss(losses: Sequence[float], terms: int, step: int) -> float:
    """F-DP-005: the mean loss of the whole batch from its micro-batches' loss sums, independent of their ranks."""
    # Along the same tree as the gradients.
    total: float = fold((0, len(losses)), losses.__getitem__, operator.add, float)
    return total / max(terms, 1)


@dataclass(frozen=True)
class StepResult:
    """The result of one update. Reals have equal bits on every backend and world size.

    digests: content, gradient, weights, optimizer; empty if contracts were off. ranks: the digests that each rank sent.
    stop, save: whether any rank requests a stop or a checkpoint after this update; the same on all ranks.
    """

    step: int
    rows: int
    terms: int
    loss: float
    grad_norm: float
    rate: float
    correct: int
    digests: Mapping[str, int]
    leaves: tuple[LeafReport, ...]
    ranks: tuple[Mapping[str, int], ...]
    stop: bool = False
    save: bool = False


@dataclass
class Pending:
    """One update in progress: its plan, and the values that the host has read so far. `result` must be called once.

    late: whether all values are read in `result`. rows, terms: the rows of the global batch and the terms of its loss.
    """

    batch: GlobalBatch
    rate: float
    updates: int
    checked: bool
    late: bool
    rows: int = 0
    terms: int = 0
    plan: tuple[LeafPlan, ...] = ()
    leaves: Sequence[Leaf] = ()
    reports: tuple[LeafReport, ...] = ()
    stop: bool = False
    save: bool = False
    norm: float = 0.0
    gradients: tuple[int, ...] = ()
    ranks: tuple[Mapping[str, int], ...] = ()
    _waiting: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = field(default_factory=list)
    _copied: torch.cuda.Event | None = None

    def read(self, tensor: torch.Tensor, then: Callable[[torch.Tensor], None]) -> None:
        """Call `then` with the values of `tensor` on the CPU: now, or in `result`."""
        if not self.late:
            then(tensor.cpu())
        elif tensor.device.type != "cuda":
            # The next update may write into this memory before it is read.
            self._waiting.append((tensor.clone(), then))
        else:
            # Only a copy into pinned memory lets the host continue.
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            self._waiting.append((copy, then))

    def end(self, device: torch.device) -> None:
        """Record an event on `device` for which `result` waits. Must be called after the last `read`."""
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def result(self) -> StepResult:
        """Wait for the device, check the update, and return its result.

        Raises the same `Violation` on every rank. A rank that raised raises its own error, and the others `RankFailed`.
        """
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        waiting, self._waiting = self._waiting, []
        for values, then in waiting:
            then(values)
        content = sum(leaf.content for leaf in self.plan) % UNSIGNED
        return StepResult(
            step=self.batch.step,
            rows=self.rows,
            terms=self.terms,
            loss=mean_loss([report.loss_sum for report in self.reports], self.terms, self.batch.step),
            grad_norm=self.norm,
            rate=self.rate,
            correct=sum(report.correct for report in self.reports),
            digests={"content": content, **self.ranks[0]} if self.ranks else {},
            leaves=self.reports,
            ranks=self.ranks,
            stop=self.stop,
            save=self.save,
        )


class _Computed(Seen[Sequence[LeafPlan]]):
    """The messages of all ranks after their backward passes. `want` is the plan."""

    @cached_property
    def leaves(self) -> Leaves:
        return Leaves(message.reports_of(self.observations), self.want, self.step)


class TrainingStep:
    """Runs updates on all local replicas of a backend, and checks each update against its contract."""

    def __init__(
        self,
        backend: Backend,
        replicas: Sequence[Replica],
        task: Task,
        micro_batches: int,
        clip_norm: float | None,
        contracts: Contracts = NO_AUDIT,
        *,
        late: bool | None = None,
    ) -> None:
        """replicas: one per local rank. micro_batches: M, the leaves of the sum; never a function of world size.

        contracts: the settings of the audit. late: check an update when its result is requested instead of at launch;
        None: if all replicas are on GPUs. Raises `ValueError` if the number of replicas is not the backend's, or if
        updates are checked late and the optimizer cannot skip one on its device.
        """
        if len(replicas) != len(backend.ranks):
            raise ValueError(f"{len(replicas)} replicas for {len(backend.ranks)} local ranks")
        self.late = reads_late(backend) if late is None else late
        self.task = task
        self._backend = backend
        self._replicas = tuple(replicas)
        self._micro_batches = micro_batches
        self._clip_norm = clip_norm
        self._owners = rank_leaves(micro_batches, backend.world_size)
        first = replicas[0]
        self._shards, self._slices = first.shards, None
        self._reduce = TreeReduction(micro_batches, first.parameters.size, backend)
        if first.shards is not None:
            weights, gradient = first.parameters, first.master.gradient
            # A host that reads at once compares the ranks before they send gradients.
            first.exchange = self._slices = SliceExchange(
                self._reduce, backend, weights, first.shards, gradient, first.layers, overlapping=self.late
            )
        self.audit = Audit(contracts, backend, replicas, task, self._owners, self._reduce.roots_of_rank)
        # One more than any rank should compute, so that a surplus is detected.
        self._report_rows = max(map(len, self._owners)) + 1
        self._agreement = Agreement(backend, replicas, _PLAIN_WIDTH + self._report_rows * message.WIDTH)
        self._gate = Gate(backend.devices)
        for replica, device in zip(replicas, backend.devices, strict=True):
            replica.gate(self._gate.on(device) if self.late else None)
        # The state of rank 0 after the last update: digests read by the host, and a word sum on the device, with which
        # the next update is compared before the host has read this one. None: unknown.
        self._weights: int | None = None
        self._optimizer: int | None = None
        self._weights_sum: torch.Tensor | None = None

    def __call__(
        self, batch: GlobalBatch, rate: float, updates: int, *, stop: bool = False, save: bool = False
    ) -> StepResult:
        """One update on `batch` with learning rate `rate`; `updates` is the count of updates after it.

        stop: this process must stop; save: it requests a checkpoint. The result combines the requests of all ranks.
        Raises the same `Violation` on every rank if a clause is broken; if that is before the optimizer step, nothing
        has changed. Raises `RankFailed` if another rank raised, and a rank's own error on that rank.
        """
        try:
            return self.launch(batch, rate, updates, stop=stop, save=save).result()
        except BaseException:
            self._gate.open()  # no update is in progress that it could veto
            raise

    def launch(
        self, batch: GlobalBatch, rate: float, updates: int, *, stop: bool = False, save: bool = False
    ) -> Pending:
        """Start the update that `__call__` describes. If updates are checked late, do not wait for the device.

        Results must be requested in order. After an error training must end: the updates launched later did nothing.
        Raises as `__call__` does unless updates are checked late.
        """
        update = Pending(batch, rate, updates, checked=enforced(), late=self.late)
        # Forward and backward on every rank. The host knows the plan: rows, owners and loss terms of each micro-batch.
        # The devices hold losses, gradients and the rows as the model received them. Every rank sends all others
        # whether it raised, and one report per micro-batch.
        partials, gathered = self._compute(update, stop=stop, save=save).result
        if self._slices is not None and not self.late:
            self._slices.finish(partials[0].roots)  # before an audit overwrites the gradient
        # Every K steps another rank recomputes some micro-batches and must get the same bits.
        if update.checked and self.audit.due(batch.step):
            self._audit_gradients(update, partials, gathered)
        # Sum all micro-batches along one fixed tree, divide once, clip once. Every rank now has the whole gradient, or
        # its slice, and reports word sums of it and of the weights before the update.
        reduced = self._finalize(update, partials)
        self._compare_slices(update, reduced)
        self._reduce_gradient(update, reduced)
        self._compare_moments(update)
        # On CPUs all of that has been checked by now. On GPUs the host has read nothing yet: the gate has checked the
        # same tables, and if it is closed, the optimizer changes nothing.
        with nullcontext() if self._slices is None else self._slices.aside():
            self._apply_update(update)
            if self.late:
                # Read last, after all tables that can explain a closed gate.
                update.read(self._gate.closed, _refuse_closed)
                update.end(self._backend.devices[0])
        return update

    # C-DP-002, F-DP-002 and, of the parts of the gradient, F-DP-003
    @requires(LOCKSTEP)
    @ensures(EACH_ONCE, ROWS_PLANNED, TERMS_PLANNED, PARTS_FINITE, of=lambda computed: computed.leaves)
    @ensures(ROWS_AGREE)
    def _compute(self, update: Pending, *, stop: bool, save: bool) -> Report:
        """Each planned micro-batch is computed once, by its owner, from its planned rows, with finite results."""
        step, roots, ranks = update.batch.step, self._reduce.roots_of_rank, self._backend.ranks

        def gradients(index: int) -> PartialGradient | Exception:
            rank = ranks[index]
            own = [update.leaves[leaf] for leaf in self._owners[rank]]
            try:
                return self._replicas[index].gradients(step, own, roots[rank], self.task, checked=update.checked)
            except Exception as error:  # noqa: BLE001 - a replica's own error must not hide another's result
                return error

        done: Sequence[PartialGradient | Exception]
        try:
            self.audit.prepare(step, checked=update.checked)
            parts = update.batch.micro_batches(self._micro_batches)
            update.leaves, update.plan = plan_leaves(parts, self._owners, self.task, checked=update.checked)
            update.rows, update.terms = len(update.batch.ids), sum(leaf.terms for leaf in update.plan)
            done = self._backend.map(gradients)
        except Exception as error:  # noqa: BLE001 - raised later: the other ranks must be notified first
            done = [error] * len(self._replicas)
        errors = [each for each in done if isinstance(each, Exception)]
        content = sum(leaf.content for leaf in update.plan)
        known = [{"failed": isinstance(each, Exception), "stop": stop, "save": save, "plan": content} for each in done]
        partials = [
            replica.completed(None if isinstance(each, Exception) else each, roots[rank])
            for replica, each, rank in zip(self._replicas, done, ranks, strict=True)
        ]
        if self._slices is not None and self.late:  # on all ranks before the next collective, also if a pass failed
            self._slices.finish(partials[0].roots)
        reports = [message.padded(each.reports, self._report_rows).flatten() for each in partials]
        gathered = self._gather(update, COMPUTED, known, reports)

        def record(table: torch.Tensor) -> _Computed:
            for error in errors:
                raise error
            computed = _Computed(gathered.observations(table), update.plan)
            # Only in lockstep: in the message of another point these columns mean something else.
            failed = [each.rank for each in computed.observations if each.values["failed"]]
            if failed and in_lockstep(computed.observations):
                raise RankFailed(f"rank {failed[0]} failed in the forward or backward pass of step {step}")
            return computed

        def keep(computed: _Computed) -> None:
            update.reports = tuple(computed.leaves.reports)
            update.stop, update.save = computed.any("stop"), computed.any("save")

        return Report(gathered.table, record, update.read, keep, checked=update.checked, result=(partials, gathered))

    @ensures(*laws.AUDITED)
    def _audit_gradients(self, update: Pending, partials: Sequence[PartialGradient], computed: Gathered) -> Report:
        """The auditor of each rank gets the same bits for the same micro-batches."""
        audited = self.audit(update.batch.step, self._agreement, update.leaves, partials, computed.payload)
        if self.late:
            self._gate.close_if(audited.differs())
        return Report(audited.gathered.table, audited.record, update.read, audited.refuse_failed)

    def _finalize(self, update: Pending, partials: Sequence[PartialGradient]) -> Gathered | None:
        """Make the gradient ready for the update and gather the message `reduced`; None unless `update` is checked."""
        held = [[self._replicas[0].master.gradient]]
        pieces = held if self._slices is not None else self._reduce([part.roots for part in partials])

        def finalize(index: int) -> torch.Tensor:
            # Without loss terms the sum is 0 already, and 0 / 0 would be NaN.
            replica, terms, limit = self._replicas[index], max(update.terms, 1), self._clip_norm
            facts = replica.finalize_gradient(pieces[index], terms, update.rate, limit, checked=update.checked)
            replica.release(partials[index])
            return facts

        def forget_state(norm: torch.Tensor) -> None:
            update.norm = float(norm.view(torch.float64)[0])
            self._weights = self._optimizer = None

        facts = self._backend.map(finalize)
        if not update.checked:
            # The state after an unchecked update is unknown, so the next one cannot be compared with it.
            self._weights_sum = None
            update.read(facts[0], forget_state)
            return None
        want = laws.Reduced(Rule.SAME if self._weights_sum is None else Rule.PREVIOUS, self._clip_norm)
        rates = [{"planned": bits_of(update.rate), "rate": bits_of(replica.rate)} for replica in self._replicas]
        sent = message.reduced(self._replicas[0].settings, self._shards is not None)
        return self._gather(update, sent, rates, facts, want, self._weights_sum)

    @requires(LOCKSTEP)
    @requires(message.GRADIENT_KEPT, message.MOMENTS_KEPT)
    def _compare_slices(self, update: Pending, reduced: Gathered | None) -> Report | None:
        """No rank's slice of the gradient or of the moments has changed since it was written."""
        if reduced is None or self._shards is None:
            return None
        return Report(reduced.table, reduced.seen, update.read)

    # C-DP-001 before the update: equal replicas. F-DP-003 of the reduced gradient.
    @requires(LOCKSTEP, laws.RATE, laws.WEIGHTS_UNCHANGED)
    @ensures(laws.GRADIENTS_AGREE, laws.FINITE, laws.CLIP)
    def _reduce_gradient(self, update: Pending, reduced: Gathered | None) -> Report | None:
        """From equal weights, every rank gets the same finite gradient, clipped once, and the planned learning rate."""
        if reduced is None:
            return None
        size, gathered, parts = self._replicas[0].parameters.size, reduced, ("gradient",) if self._shards else ()

        def record(table: torch.Tensor) -> Seen[Any]:
            # Evaluated here: on GPUs the previous update is read after this one was launched.
            want = laws.Reduced(Rule.SAME if self._weights is None else self._weights, self._clip_norm)
            return gathered.seen(gathered.joined(table, parts), want, partial(message.reduced_values, size))

        def keep(reduced: Seen[laws.Reduced]) -> None:
            update.norm = real_of(reduced.column("norm")[0])
            update.gradients = tuple(reduced.column("gradient"))

        return Report(gathered.table, record, update.read, keep, self._look("gradient", "weights"))

    @requires(laws.OPTIMIZER_UNCHANGED)
    def _compare_moments(self, update: Pending) -> Report | None:
        """A single rank's moments have not changed since its last update. Several ranks compare theirs after each."""
        if self._backend.world_size > 1 or self.late or not update.checked or self._optimizer is None:
            return None
        digest = signed(self._replicas[0].optimizer_digest())
        seen = Seen([Observation(0, update.batch.step, 0, REDUCED.point, {"optimizer": digest})], self._optimizer)
        return Report(torch.empty(0), lambda _: seen)

    @ensures(LOCKSTEP, UPDATE_AUDITED)
    def _audit_update(self, update: Pending, recomputed: torch.Tensor | None) -> Report | None:
        """The auditor of each rank gets the same weights and moments in that rank's slice. None: no audit is due."""
        if recomputed is None:
            return None
        replica, step = self._replicas[0], update.batch.step
        facts = torch.cat([replica.updated_slice(), recomputed])
        known = [{"subject": self.audit.subject_of(step)}]
        values = ("weights", *moments_of(replica.settings))[: len(facts) // 2]
        names = [f"{when} {each}" for when in ("own", "again") for each in values]
        gathered = self._agreement.gather(step, "update audited", known, [facts], names)
        if self.late:
            left, again = gathered.table[:, HEADER + 1 : gathered.length].chunk(2, dim=1)
            self._gate.close_if((left[gathered.column("subject")] != again).any())
        return Report(gathered.table, gathered.seen, update.read)

    # C-DP-001 and F-DP-001 after the update: equal replicas
    @requires(LOCKSTEP)
    @ensures(laws.ONE_UPDATE, laws.OPTIMIZERS, laws.REPLICAS)
    def _apply_update(self, update: Pending) -> Report | None:
        audited: torch.Tensor | None = None
        if update.rows:
            if update.checked and self._shards is not None and self.audit.due(update.batch.step):
                audited = self._replicas[0].recomputed_update(self.audit.subject_of(update.batch.step))
            self._backend.map(lambda index: self._replicas[index].apply())
            if self._slices is not None:
                self._slices.gather()
        if not update.checked:
            return None
        self._audit_update(update, audited)
        facts = self._backend.map(lambda index: self._replicas[index].after_update())
        settings, size = self._replicas[0].settings, self._replicas[0].parameters.size
        parts = moments_of(settings) if self._shards else ()
        sent = message.updated(settings, self._shards is not None)
        gathered = self._gather(update, sent, [{} for _ in facts], facts, update.updates)
        self._weights_sum = gathered.column("weights")[0] if self.late else None

        def keep(left: Seen[int]) -> None:
            weights, moments = left.column("weights"), left.column("optimizer")
            self._weights, self._optimizer = weights[0], moments[0]
            update.ranks = tuple(
                {"gradient": gradient % UNSIGNED, "weights": own % UNSIGNED, "optimizer": optimizer % UNSIGNED}
                for gradient, own, optimizer in zip(update.gradients, weights, moments, strict=True)
            )

        def record(table: torch.Tensor) -> Seen[int]:
            values = partial(message.state_values, settings, size)
            return gathered.seen(gathered.joined(table, parts), update.updates, values)

        return Report(gathered.table, record, update.read, keep, self._look("weights", "optimizer"))

    def _gather(
        self,
        update: Pending,
        sent: message.Message,
        known: Sequence[Mapping[str, int]],
        facts: Sequence[torch.Tensor],
        want: object = None,
        held: torch.Tensor | None = None,
    ) -> Gathered:
        """Gather the message `sent`. The gate checks it if updates are checked late. want, held: see `Gate.look`."""
        world, expected = self._backend.world_size, None
        if self.late and sent is COMPUTED:
            expected = message.expected_computed(update.plan, world, self._report_rows, checked=update.checked)
        elif self.late:
            expected = [sent.expected(want)] * world
        gathered = self._agreement.gather(update.batch.step, sent.point, known, facts, sent.on_device, expected)
        if gathered.expected is not None:
            clipping = want if isinstance(want, laws.Reduced) else None
            self._gate.look(gathered.sent, gathered.expected, held, clipping)
        return gathered

    @requires(LOCKSTEP, message.MOMENTS_KEPT)
    def gather_state(self, step: int) -> Report | None:
        """Make rank 0's `state_tensors` whole. Collective. Raises `Violation` if a moment changed since its update."""
        if self._shards is None:
            return None
        replica = self._replicas[0]
        moved = dict(zip(moments_of(replica.settings), replica.moved()[1:].tolist(), strict=True))
        replica.gather_state()
        known = {f"{name}{message.MOVED}": value for name, value in moved.items()}
        gathered = self._agreement.gather(step, "saved", [known])
        return Report(gathered.table, gathered.seen)

    def _look(self, *names: str) -> Callable[[Seen[object]], Details]:
        def compare(seen: Seen[object]) -> Details:
            if self._slices is not None:
                self._slices.settle()  # the next update may have been launched
            return self._agreement.compare(seen, {name: _COMPARED[name] for name in names})

        return compare

    @requires(LOCKSTEP)
    @ensures(laws.FROZEN)
    def attest_base(self, step: int, expected: int) -> Report | None:
        """Every rank's frozen weights still have the digest `expected`. No update may be in progress."""
        if not enforced():
            return None
        digests = self._backend.map(lambda index: self._replicas[index].base_digest())
        known = [{"base": digest, "first base": expected} for digest in digests]
        gathered = self._agreement.gather(step, laws.BASE_POINT, known)
        return Report(gathered.table, gathered.seen, look=self._look("base"))

    # C-DP-001 before the first update
    @ensures(*laws.START)
    def attest_start(self, observed: Mapping[str, int]) -> Report:
        """All ranks start from the same layout, weights, base and further values `observed` (name to digest).

        Must be called after a restore: the first update must start from these weights. Raises `Violation`.
        """
        known = [
            {"layout": r.layout_digest(), "weights": r.weights_digest(), "base": r.base_digest(), **observed}
            for r in self._replicas
        ]
        gathered = self._agreement.gather(0, "start", known)

        def keep(start: Seen[None]) -> None:
            first, on = self._replicas[0], enforced()
            self._weights = start.column("weights")[0] if on else None
            self._optimizer = signed(first.optimizer_digest()) if on else None
            # A device compares word sums; only the host turns them into digests.
            self._weights_sum = word_sums([first.weights_of_model()], finite=False)[0] if self.late and on else None

        return Report(gathered.table, gathered.seen, keep=keep)


def _refuse_closed(closed: torch.Tensor) -> None:
    if bool(closed):
        raise RuntimeError("the device refused an update for which the host finds no reason")
