"""The step: plan, shard, compute, judge, reduce, judge, apply, attest. One path for every backend.

Where ranks are on CPUs everything is judged where it is seen. On GPUs nobody waits for the device: what ranks say of a
step stays there, closes the gate of the update if anything is wrong with it, and is read and judged a step later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from andon.backend.base import Backend
from andon.step.agreement import Agreement, Gathered, RankFailed
from andon.step.audit import NO_AUDIT, Audit, AuditSpec
from andon.step.contracts import leaves_of, padded, plan_leaves, planned_reports, reports_of
from andon.step.course import UNSIGNED, Course, Pending, StepResult
from andon.step.gate import Expected, Gate, expected_row
from andon.step.micro_batch import REPORT_FIELDS
from andon.step.optimizer import rules_for_facts
from andon.step.plan import GlobalBatch, rank_leaves
from andon.step.readings import Readings, reads_late
from andon.step.reduce import PlainReduction, TreeReduction
from andon.step.replica import REDUCED_FACTS, PartialGradient, Replica
from andon.step.task import Task
from andon_contracts.agree import Observation, bits_of, real_of, signed
from andon_contracts.laws.law import LOCKSTEP, Judgement, Rule, Seen, rules_of, settle, unbroken
from andon_contracts.laws.rows import LEAVES, PLANNED, LeafPlan, Leaves
from andon_contracts.laws.update import BASE, REDUCED, START, UPDATED, Due, Reduced
from andon_contracts.policy import enforced, require

__all__ = ["Pending", "RankFailed", "StepResult", "TrainingStep"]

T = TypeVar("T")
W = TypeVar("W")
Judging = Callable[[tuple[Observation, ...]], None]
_PLAIN_WIDTH = 32
"""Integers in a message of the step besides the reports: its header and its values, with room to spare."""
COMPUTED_FACTS = ("failed", "stop", "plan")
RATES = ("planned", "rate")
"""What the host knows of an update before it; in this order, since a device holds a rate against the column ahead."""


class TrainingStep:
    """Runs updates on all local replicas of a backend and holds each to its contract."""

    def __init__(
        self,
        backend: Backend,
        replicas: Sequence[Replica],
        task: Task,
        micro_batches: int,
        clip_norm: float | None,
        audit: AuditSpec = NO_AUDIT,
        *,
        late: bool | None = None,
        exact: bool = True,
        shares: Sequence[int] | None = None,
    ) -> None:
        """replicas: one for each local rank. micro_batches: M, the leaves of the sum; never a function of world size.

        late: whether an update is judged when its result is asked for, and not while it is launched; None: where all
        replicas are on GPUs. exact: otherwise each rank computes its whole share at once, whatever M is, and sums are
        taken in whatever order is fastest, so that the bits depend on the number of ranks. shares: micro-batches of
        each rank, where they are not to be as many for all; they change who computes a sum, and not its order.

        Raises `ValueError` for shares that do not fit or without exact sums, where the number of replicas is not the
        backend's, and where their optimizer cannot be kept from an update that is judged late.
        """
        if len(replicas) != len(backend.ranks):
            msg = f"{len(replicas)} replicas for {len(backend.ranks)} local ranks"
            raise ValueError(msg)
        self.late = reads_late(backend) if late is None else late
        self._backend = backend
        self._replicas = tuple(replicas)
        self._task = task
        self._micro_batches = micro_batches if exact else backend.world_size
        self._clip_norm = clip_norm
        if shares is not None and not exact:
            raise ValueError("shares are of micro-batches, which there are none of without exact sums")
        self._owners = rank_leaves(self._micro_batches, backend.world_size, shares)
        size = replicas[0].parameters.size
        self._reduce = TreeReduction(micro_batches, size, backend, shares) if exact else PlainReduction(backend)
        self._audit = Audit(audit, backend, replicas, task, self._owners, self._reduce.roots_of_rank)
        # One more than any rank is to compute, so that a surplus is seen.
        self._report_rows = max(map(len, self._owners)) + 1
        self._agreement = Agreement(backend, replicas, _PLAIN_WIDTH + self._report_rows * len(REPORT_FIELDS))
        self._gate = Gate(backend.devices)
        for replica, device in zip(replicas, backend.devices, strict=True):
            replica.gate(self._gate.on(device) if self.late else None)
        self._weights: int | None = None
        self._weights_there: torch.Tensor | None = None

    def __call__(self, batch: GlobalBatch, rate: float, updates: int, *, stop: bool = False) -> StepResult:
        """One update on `batch` with learning rate `rate`; `updates` is the count of updates after it.

        stop: this process was asked to stop; the result says whether any was.

        Raises `Violation` on every rank alike if a clause does not hold; up to the update, nothing has changed then.
        Raises `RankFailed` where another rank raised, and a rank's own error on that rank.
        """
        try:
            return self.launch(batch, rate, updates, stop=stop).result()
        except BaseException:
            self._gate.open()  # nothing is under way that it would have to hold back
            raise

    def launch(self, batch: GlobalBatch, rate: float, updates: int, *, stop: bool = False) -> Pending:
        """Begin the update that `__call__` describes; where it is judged late, do not wait for the device.

        Results are to be asked for in order, and what one raises ends the training: the updates launched after it did
        nothing. Raises as `__call__` does where nothing is judged late.
        """
        course = Course(batch, rate, updates, enforced(), Readings(late=self.late))
        partials = self._compute(course, stop=stop)
        if course.checked and self._audit.spec.due(batch.step):
            audited = self._audit(batch.step, self._agreement, leaves_of(course.plan), partials, course.reported)
            if self.late:
                self._gate.close_if(audited.differs())
            course.readings.read(audited.gathered.table, audited.judge)
        self._reduce_and_clip(course, partials)
        if course.rows:
            self._each(lambda replica: replica.apply())
        if course.checked:
            self._attest(course)
        else:
            self._weights_there = None
        self._close(course)
        return Pending(course)

    def _close(self, course: Course) -> None:
        """The last reading of an update: nothing was found by a device that the host did not find."""

        def read(closed: torch.Tensor) -> None:
            if bool(closed):
                raise RuntimeError("the device refused an update for which the host finds no reason")
            if not course.checked:
                self._weights = None  # left behind without contracts: no later step can be held to them

        course.readings.read(self._gate.closed if self.late else torch.zeros(()), read)
        course.readings.end()

    def _each(self, work: Callable[[Replica], T]) -> list[T]:
        return self._backend.map(lambda index: work(self._replicas[index]))

    def _judged(
        self,
        course: Course,
        gathered: Gathered,
        judging: Judging,
        held: torch.Tensor | None = None,
        want: Reduced | None = None,
    ) -> None:
        """Judge what was gathered: now, or once it is read, and then the device holds it against what it must be."""
        if gathered.expected is not None:
            self._gate.look(gathered.said, gathered.expected, held, want)
        course.readings.read(gathered.table, lambda table: judging(gathered.observations(table)))

    def _plan(self, batch: GlobalBatch, *, checked: bool) -> tuple[LeafPlan, ...]:
        parts = batch.micro_batches(self._micro_batches)
        if checked:
            return plan_leaves(parts, self._owners, self._task)
        return tuple(LeafPlan(index, 0, part, 0) for index, part in enumerate(parts))

    def _compute(self, course: Course, *, stop: bool) -> list[PartialGradient]:
        """Forward and backward everywhere, then one gather that says for every rank what it did, or that it failed."""
        done: Sequence[PartialGradient | Exception]
        try:
            self._audit.prepare(course.batch.step, checked=course.checked)
            course.plan = self._plan(course.batch, checked=course.checked)
            done = self._backend.map(self._gradient_work(course))
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it before it is raised
            done = [error] * len(self._replicas)
        content = sum(leaf.content for leaf in course.plan)
        gathered = self._agreement.gather(
            course.batch.step,
            "computed",
            [dict(zip(COMPUTED_FACTS, (isinstance(each, Exception), stop, content), strict=True)) for each in done],
            [self._report_table(result, index).flatten() for index, result in enumerate(done)],
            expected=self._expect_computed(course) if self.late else None,
        )
        course.reported = gathered.payload
        self._judged(course, gathered, lambda observations: self._judge_computed(course, done, observations))
        partials = [
            replica.nothing() if isinstance(result, Exception) else result
            for replica, result in zip(self._replicas, done, strict=True)
        ]
        if not self.late:
            return partials
        roots = [self._reduce.roots_of_rank[rank] for rank in self._backend.ranks]
        return [r.completed(partial, own) for r, partial, own in zip(self._replicas, partials, roots, strict=True)]

    def _gradient_work(self, course: Course) -> Callable[[int], PartialGradient | Exception]:
        planned = leaves_of(course.plan)

        def work(index: int) -> PartialGradient | Exception:
            rank = self._backend.ranks[index]
            leaves = [planned[leaf] for leaf in self._owners[rank]]
            try:
                return self._replicas[index].gradients(
                    course.batch.step, leaves, self._reduce.roots_of_rank[rank], self._task, checked=course.checked
                )
            except Exception as error:  # noqa: BLE001 - a replica's own error must not hide another's result
                return error

        return work

    def _report_table(self, result: PartialGradient | Exception, index: int) -> torch.Tensor:
        none = torch.empty((0, len(REPORT_FIELDS)), dtype=torch.int64, device=self._backend.devices[index])
        return padded(none if isinstance(result, Exception) else result.reports, self._report_rows)

    def _expect_computed(self, course: Course) -> Expected:
        rules = {"failed": 0, **(rules_of(PLANNED, None) if course.checked else {})}
        row = expected_row(rules, COMPUTED_FACTS)
        return [
            [*row, *planned_reports(course.plan, rank, self._report_rows, checked=course.checked)]
            for rank in range(self._backend.world_size)
        ]

    def _judge_computed(
        self,
        course: Course,
        done: Sequence[PartialGradient | Exception],
        observations: Sequence[Observation],
    ) -> None:
        for result in done:
            if isinstance(result, Exception):
                raise result
        settle(Judgement((LOCKSTEP,), Seen(observations, None)))
        failed = [o.rank for o in observations if o.values["failed"]]
        if failed:
            msg = f"rank {failed[0]} failed in the forward or backward pass of step {course.batch.step}"
            raise RankFailed(msg)
        settle(Judgement(PLANNED, Seen(observations, None)))
        course.reports = reports_of(observations)
        course.stop = any(o.values["stop"] for o in observations)
        if course.checked:
            settle(Judgement(LEAVES, Leaves(course.reports, course.plan, course.batch.step)))

    def _reduce_and_clip(self, course: Course, partials: Sequence[PartialGradient]) -> None:
        """Reduce, divide once by the count of rows, clip once, judge."""
        pieces = self._reduce([partial.roots for partial in partials])
        facts = self._backend.map(lambda index: self._take(course, index, pieces[index], partials[index]))
        if not course.checked:
            course.readings.read(facts[0], lambda norm: setattr(course, "norm", float(norm.view(torch.float64)[0])))
            return
        want = Reduced(Rule.SAME if self._weights_there is None else Rule.HELD, self._clip_norm)
        rates = [dict(zip(RATES, (bits_of(course.rate), bits_of(each.rate)), strict=True)) for each in self._replicas]
        expected = self._agreement.expected(rules_of(REDUCED, want), (*RATES, *REDUCED_FACTS)) if self.late else None
        gathered = self._agreement.gather(course.batch.step, "reduced", rates, facts, REDUCED_FACTS, expected)
        self._judged(
            course,
            gathered,
            lambda observations: self._judge_reduced(course, observations),
            self._weights_there,
            want,
        )

    def _take(
        self, course: Course, index: int, pieces: Sequence[torch.Tensor], partial: PartialGradient
    ) -> torch.Tensor:
        """Make one replica's gradient what its optimizer gets; int64 `REDUCED_FACTS`, or the norm's bits alone."""
        replica = self._replicas[index]
        replica.set_gradient(pieces, max(course.rows, 1))
        replica.release(partial)
        replica.set_rate(course.rate)
        sums = replica.before_update() if course.checked else None
        norm = replica.gradient_norm()
        replica.clip(self._clip_norm, norm)
        norms = torch.stack([norm] if sums is None else [norm, replica.gradient_norm()])
        bits = norms.double().view(torch.int64)
        return (bits if sums is None else torch.cat([sums, bits])).to(replica.device)

    def _judge_reduced(self, course: Course, observations: Sequence[Observation]) -> None:
        read = self._replicas[0].read_before_update
        said = [replace(each, values=read(each.values)) for each in observations]
        want = Reduced(Rule.SAME if self._weights is None else self._weights, self._clip_norm)
        looks = {"gradient": Replica.reduced_gradient, "weights": _weights}
        self._take_reduced(course, self._agreement.judgement(REDUCED, Seen(said, want), looks))

    @require(unbroken)
    def _take_reduced(self, course: Course, judgement: Judgement[Seen[Reduced]]) -> None:
        seen = judgement.seen
        course.norm = real_of(seen.said[0].values["norm"])
        course.gradients = tuple(seen.column("gradient"))

    def _attest(self, course: Course) -> None:
        """Digest what the update left on every rank, and agree on it."""
        facts = self._each(lambda replica: replica.after_update())
        spec = self._replicas[0].spec
        rules = rules_for_facts(spec, rules_of(UPDATED, Due(course.updates))) if self.late else {}
        expected = self._agreement.expected(rules, spec.facts) if self.late else None
        gathered = self._agreement.gather(
            course.batch.step, "updated", [{} for _ in facts], facts, spec.facts, expected
        )
        self._weights_there = gathered.table[0, gathered.column("weights")] if self.late else None
        self._judged(course, gathered, lambda observations: self._judge_updated(course, observations))

    def _judge_updated(self, course: Course, observations: Sequence[Observation]) -> None:
        read = self._replicas[0].read_after_update
        said = [replace(each, values=read(each.values)) for each in observations]
        looks = {"weights": _weights, "optimizer": Replica.optimizer_state}
        self._take_updated(course, self._agreement.judgement(UPDATED, Seen(said, Due(course.updates)), looks))

    @require(unbroken)
    def _take_updated(self, course: Course, judgement: Judgement[Seen[Due]]) -> None:
        said = judgement.seen.said
        self._weights = said[0].values["weights"]
        course.ranks = tuple(
            {
                "gradient": gradient % UNSIGNED,
                "weights": each.values["weights"] % UNSIGNED,
                "optimizer": each.values["optimizer"] % UNSIGNED,
            }
            for gradient, each in zip(course.gradients, said, strict=True)
        )

    def attest_base(self, step: int, expected: int) -> None:
        """Every rank's frozen weights are still those of the start (digest `expected`). Raises `Violation`.

        To be called with no update under way.
        """
        if not enforced():
            return
        observed = [{"base": digest} for digest in self._each(lambda replica: replica.base_digest())]
        observations = self._agreement.observe(step, "base", observed)
        settle(self._agreement.judgement(BASE, Seen(observations, signed(expected)), {"base": Replica.frozen}))

    def attest_start(self, observed: Mapping[str, int]) -> None:
        """All ranks start from the same layout, weights, base and whatever else is `observed` (name to digest).

        To be called when everything is restored: the first update is held to these weights. Raises `Violation`.
        """
        values = [
            {"layout": r.layout_digest(), "weights": r.weights_digest(), "base": r.base_digest(), **observed}
            for r in self._replicas
        ]
        observations = self._agreement.observe(0, "start", values)
        settle(Judgement(START, Seen(observations, None)))
        self._weights = observations[0].values["weights"] if enforced() else None
        self._weights_there = self._replicas[0].before_update()[2] if self.late and enforced() else None


def _weights(replica: Replica) -> Mapping[str, torch.Tensor]:
    return replica.parameters.weight_views()
