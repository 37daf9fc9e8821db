"""The step: plan, shard, compute, judge, reduce, judge, apply, attest. One path for every backend."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from andon.backend.base import Backend
from andon.exits import Exit
from andon.step.agreement import Agreement
from andon.step.audit import NO_AUDIT, Audit, AuditSpec
from andon.step.contracts import (
    LeafPlan,
    LeafReport,
    judge_leaves,
    judge_plans,
    judge_presence,
    leaves_of,
    padded,
    plan_leaves,
    reports_of,
)
from andon.step.plan import GlobalBatch, rank_leaves
from andon.step.reduce import TreeReduction
from andon.step.replica import REPORT_FIELDS, PartialGradient, Replica
from andon.step.task import Task
from andon.step.tree import fold
from andon_contracts import judge
from andon_contracts.agree import bits_of, signed
from andon_contracts.observe import nonfinite
from andon_contracts.policy import enforced

T = TypeVar("T")
_UNSIGNED = 1 << 64
_PLAIN_WIDTH = 32
"""Integers in a message of the step besides the reports: its header and its values, with room to spare."""


class RankFailed(RuntimeError):
    """Another rank raised; that rank reports its own error, and this one only that it noticed."""

    ends_with = Exit.RANK_LOST


@dataclass(frozen=True)
class StepResult:
    """What one update did. Reals are exact: equal bits on every backend and world size."""

    step: int
    rows: int
    loss: float
    grad_norm: float
    rate: float
    correct: int
    digests: Mapping[str, int]
    """content, gradient, weights, optimizer; empty where the contracts are off."""
    leaves: tuple[LeafReport, ...]
    ranks: tuple[Mapping[str, int], ...]
    """By rank: its digests, as it saw them."""
    stop: bool = False
    """Whether any rank was asked to stop after this update; all ranks know it alike."""


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
    ) -> None:
        """replicas: one for each local rank. micro_batches: M, the leaves of the sum; never a function of world size.

        Raises `ValueError` where the number of replicas is not the backend's.
        """
        if len(replicas) != len(backend.ranks):
            msg = f"{len(replicas)} replicas for {len(backend.ranks)} local ranks"
            raise ValueError(msg)
        self._backend = backend
        self._replicas = tuple(replicas)
        self._task = task
        self._micro_batches = micro_batches
        self._clip_norm = clip_norm
        self._owners = rank_leaves(micro_batches, backend.world_size)
        self._reduce = TreeReduction(micro_batches, replicas[0].parameters.size, backend)
        self._audit = Audit(audit, backend, replicas, task, self._owners, self._reduce.roots_of_rank)
        # One more than any rank is to compute, so that a surplus is seen.
        self._report_rows = len(self._owners[0]) + 1
        self._agreement = Agreement(backend, replicas, _PLAIN_WIDTH + self._report_rows * len(REPORT_FIELDS))
        self._gradient_digests: list[int] = []
        self._weights: int | None = None

    def __call__(self, batch: GlobalBatch, rate: float, updates: int, *, stop: bool = False) -> StepResult:
        """One update on `batch` with learning rate `rate`; `updates` is the count of updates after it.

        stop: this process was asked to stop; the result says whether any was.

        Raises `Violation` on every rank alike if a clause does not hold; up to the update, nothing has changed then.
        Raises `RankFailed` where another rank raised, and a rank's own error on that rank.
        """
        checked = enforced()
        plan, partials, reports, stopping = self._compute(batch, checked=checked, stop=stop)
        if checked:
            judge_leaves(reports, plan, batch.step)
            self._audited(batch.step, plan, partials, reports)
        rows = sum(report.rows for report in reports)
        norm = self._reduce_and_clip(batch.step, partials, rows, rate, checked=checked)
        if rows:
            self._each(lambda replica: replica.apply())
        ranks = self._attest(batch.step, updates) if checked else self._unattested()
        content = sum(leaf.content for leaf in plan) % _UNSIGNED
        digests = {"content": content, **ranks[0]} if ranks else {}
        return StepResult(
            step=batch.step,
            rows=rows,
            loss=_tree_sum([report.loss_sum for report in reports]) / max(rows, 1),
            grad_norm=norm,
            rate=rate,
            correct=sum(report.correct for report in reports),
            digests=digests,
            leaves=reports,
            ranks=ranks,
            stop=stopping,
        )

    def _plan(self, batch: GlobalBatch, *, checked: bool) -> tuple[LeafPlan, ...]:
        parts = batch.micro_batches(self._micro_batches)
        if checked:
            return plan_leaves(parts, self._owners, self._task)
        return tuple(LeafPlan(index, 0, part, 0) for index, part in enumerate(parts))

    def _each(self, work: Callable[[Replica], T]) -> list[T]:
        return self._backend.map(lambda index: work(self._replicas[index]))

    def _compute(
        self, batch: GlobalBatch, *, checked: bool, stop: bool
    ) -> tuple[tuple[LeafPlan, ...], list[PartialGradient], tuple[LeafReport, ...], bool]:
        """Forward and backward everywhere, then one gather that says for every rank what it did, or that it failed."""
        plan: tuple[LeafPlan, ...] = ()
        done: Sequence[PartialGradient | Exception]
        try:
            self._audit.prepare(batch.step, checked=checked)
            plan = self._plan(batch, checked=checked)
            done = self._backend.map(self._gradient_work(batch, plan, checked=checked))
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it before it is raised
            done = [error] * len(self._replicas)
        content = sum(leaf.content for leaf in plan)
        observations = self._agreement.gather(
            batch.step,
            "computed",
            [{"failed": isinstance(result, Exception), "stop": stop, "plan": content} for result in done],
            [self._report_table(result, index) for index, result in enumerate(done)],
        )
        for result in done:
            if isinstance(result, Exception):
                raise result
        judge_presence(observations)
        failed = [o.rank for o in observations if o.values["failed"]]
        if failed:
            msg = f"rank {failed[0]} failed in the forward or backward pass of step {batch.step}"
            raise RankFailed(msg)
        judge_plans(observations)
        partials = [result for result in done if isinstance(result, PartialGradient)]
        return plan, partials, reports_of(observations), any(o.values["stop"] for o in observations)

    def _gradient_work(
        self, batch: GlobalBatch, plan: Sequence[LeafPlan], *, checked: bool
    ) -> Callable[[int], PartialGradient | Exception]:
        planned = leaves_of(plan)

        def work(index: int) -> PartialGradient | Exception:
            rank = self._backend.ranks[index]
            leaves = [planned[leaf] for leaf in self._owners[rank]]
            try:
                return self._replicas[index].gradients(
                    batch.step, leaves, self._reduce.roots_of_rank[rank], self._task, checked=checked
                )
            except Exception as error:  # noqa: BLE001 - a replica's own error must not hide another's result
                return error

        return work

    def _report_table(self, result: PartialGradient | Exception, index: int) -> torch.Tensor:
        none = torch.empty((0, len(REPORT_FIELDS)), dtype=torch.int64, device=self._backend.devices[index])
        return padded(none if isinstance(result, Exception) else result.reports, self._report_rows)

    def _audited(
        self,
        step: int,
        plan: Sequence[LeafPlan],
        partials: Sequence[PartialGradient],
        reports: Sequence[LeafReport],
    ) -> None:
        """Where an audit is due, other ranks compute again what is about to be reduced."""
        if not self._audit.spec.due(step):
            return
        digests = {report.index: report.gradient for report in reports}
        observations = self._audit(step, self._agreement, leaves_of(plan), partials, digests)
        failed = [o.rank for o in observations if o.values["failed"]]
        if failed:
            msg = f"rank {failed[0]} failed in the audit of step {step}"
            raise RankFailed(msg)

    def _reduce_and_clip(
        self, step: int, partials: Sequence[PartialGradient], rows: int, rate: float, *, checked: bool
    ) -> float:
        """Reduce, divide once by the count of rows, judge, clip once. Returns the norm before clipping."""
        pieces = self._reduce([partial.roots for partial in partials])

        def take(index: int) -> None:
            self._replicas[index].set_gradient(pieces[index], max(rows, 1))
            self._replicas[index].release(partials[index])

        self._backend.map(take)
        self._each(lambda replica: replica.set_rate(rate))
        gradients = self._each(lambda replica: replica.gradient_digest()) if checked else []
        norms = self._each(lambda replica: float(replica.gradient_norm()))
        if checked:
            self._judge_reduced(step, gradients, norms, rate)
        clipped = self._each(lambda replica: float(replica.clip(self._clip_norm, norms[0])))
        if checked:
            observed = [{"norm": bits_of(n), "clipped": bits_of(c)} for n, c in zip(norms, clipped, strict=True)]
            judge.judge_clip(self._agreement.gather(step, "clipped", observed), self._clip_norm)
        self._gradient_digests = gradients
        return norms[0]

    def _judge_reduced(self, step: int, gradients: Sequence[int], norms: Sequence[float], rate: float) -> None:
        weights = self._each(lambda replica: replica.weights_digest())
        bad = self._each(lambda replica: int(nonfinite(replica.parameters.gradient)))
        rates = self._each(lambda replica: bits_of(replica.rate))
        observed = [
            {
                "gradient": g,
                "weights": w,
                "nonfinite": n,
                "norm": bits_of(norm),
                "rate": held,
                "planned": bits_of(rate),
            }
            for g, w, n, norm, held in zip(gradients, weights, bad, norms, rates, strict=True)
        ]
        observations = self._agreement.gather(step, "reduced", observed)
        looks = {"gradient": _gradients, "weights": _weights}
        judge.judge_reduced(observations, self._agreement.second_looks(observations, looks), self._weights)

    def _unattested(self) -> tuple[Mapping[str, int], ...]:
        """An update without contracts leaves weights that no later step can be held to."""
        self._weights = None
        return ()

    def _attest(self, step: int, updates: int) -> tuple[Mapping[str, int], ...]:
        """Digest what the update left on every rank, and agree on it."""
        weights = self._each(lambda replica: replica.weights_digest())
        moments = self._each(lambda replica: replica.optimizer_digest())
        taken = self._each(lambda replica: replica.updates)
        observed = [
            {"weights": w, "optimizer": m, "updates": u, "gradient": g}
            for w, m, u, g in zip(weights, moments, taken, self._gradient_digests, strict=True)
        ]
        observations = self._agreement.gather(step, "updated", observed)
        looks = {"weights": _weights, "optimizer": Replica.optimizer_state}
        judge.judge_update(observations, self._agreement.second_looks(observations, looks), updates)
        self._weights = observations[0].values["weights"]
        names = ("gradient", "weights", "optimizer")
        return tuple({name: o.values[name] % _UNSIGNED for name in names} for o in observations)

    def attest_base(self, step: int, expected: int) -> None:
        """Every rank's frozen weights are still those of the start (digest `expected`). Raises `Violation`."""
        if not enforced():
            return
        observed = [{"base": digest} for digest in self._each(lambda replica: replica.base_digest())]
        observations = self._agreement.gather(step, "base", observed)
        details = self._agreement.second_looks(observations, {"base": Replica.frozen})
        judge.judge_base(observations, details, signed(expected))

    def attest_start(self, observed: Mapping[str, int]) -> None:
        """All ranks start from the same layout, weights, base and whatever else is `observed` (name to digest).

        To be called when everything is restored: the first update is held to these weights. Raises `Violation`.
        """
        values = [
            {"layout": r.layout_digest(), "weights": r.weights_digest(), "base": r.base_digest(), **observed}
            for r in self._replicas
        ]
        observations = self._agreement.gather(0, "start", values)
        judge.judge_start(observations)
        self._weights = observations[0].values["weights"] if enforced() else None


def _weights(replica: Replica) -> Mapping[str, torch.Tensor]:
    return replica.parameters.weight_views()


def _gradients(replica: Replica) -> Mapping[str, torch.Tensor]:
    return replica.parameters.views(replica.parameters.gradient)


def _tree_sum(values: Sequence[float]) -> float:
    """The sum of the micro-batches' losses along the same tree as their gradients."""
    total: float = fold((0, len(values)), values.__getitem__, operator.add, float)
    return total
