"""The step: plan, shard, compute, judge, reduce, judge, apply, attest. One path for every backend.

Where ranks are on CPUs everything is judged where it is seen. On GPUs nobody waits for the device: what ranks say of a
step stays there, closes the gate of the update if anything is wrong with it, and is read and judged a step later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from andon.backend.base import Backend
from andon.config.schema import Contracts
from andon.step.agreement import Agreement, Gathered, RankFailed
from andon.step.audit import NO_AUDIT, Audit
from andon.step.gate import Expected, Gate, expected_row
from andon.step.micro_batch import REPORT_FIELDS, Leaf, padded, plan_leaves, planned_reports, reports_of
from andon.step.optimizer import read_reduced, read_state, rules_for_facts, update_facts
from andon.step.pending import UNSIGNED, Pending, StepResult, reads_late
from andon.step.plan import GlobalBatch, rank_leaves
from andon.step.reduce import TreeReduction
from andon.step.replica import REDUCED_FACTS, PartialGradient, Replica
from andon.step.task import Task
from andon_contracts.agree import Observation, bits_of, real_of
from andon_contracts.digest import signed
from andon_contracts.laws import update as laws
from andon_contracts.laws.law import LOCKSTEP, Judgement, Rule, Seen, enforce, rules_of
from andon_contracts.observe import word_sums
from andon_contracts.policy import enforced

__all__ = ["Pending", "RankFailed", "StepResult", "TrainingStep"]

_PLAIN_WIDTH = 32
"""Integers in a message of the step besides the reports: its header and its values, with room to spare."""
COMPUTED_FACTS = ("failed", "stop", "save", "plan")
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
        contracts: Contracts = NO_AUDIT,
        *,
        late: bool | None = None,
    ) -> None:
        """replicas: one for each local rank. micro_batches: M, the leaves of the sum; never a function of world size.

        contracts: when and what is audited.
        late: whether an update is judged when its result is asked for, and not while it is launched; None: where all
        replicas are on GPUs.

        Raises `ValueError` if the number of replicas is not the backend's, and if their optimizer cannot be kept from
        an update that is judged late.
        """
        if len(replicas) != len(backend.ranks):
            msg = f"{len(replicas)} replicas for {len(backend.ranks)} local ranks"
            raise ValueError(msg)
        self.late = reads_late(backend) if late is None else late
        self._backend = backend
        self._replicas = tuple(replicas)
        self._task = task
        self._micro_batches = micro_batches
        self._clip_norm = clip_norm
        self._owners = rank_leaves(micro_batches, backend.world_size)
        self._reduce = TreeReduction(micro_batches, replicas[0].parameters.size, backend)
        self.audit = Audit(contracts, backend, replicas, task, self._owners, self._reduce.roots_of_rank)
        # One more than any rank is to compute, so that a surplus is seen.
        self._report_rows = max(map(len, self._owners)) + 1
        self._agreement = Agreement(backend, replicas, _PLAIN_WIDTH + self._report_rows * len(REPORT_FIELDS))
        self._gate = Gate(backend.devices)
        for replica, device in zip(replicas, backend.devices, strict=True):
            replica.gate(self._gate.on(device) if self.late else None)
        self._weights: int | None = None
        self._optimizer: int | None = None
        self._weights_there: torch.Tensor | None = None

    def __call__(
        self, batch: GlobalBatch, rate: float, updates: int, *, stop: bool = False, save: bool = False
    ) -> StepResult:
        """One update on `batch` with learning rate `rate`; `updates` is the count of updates after it.

        stop: this process must stop; save: it requests a checkpoint. The result combines the requests of all ranks.

        Raises `Violation` on every rank alike if a clause does not hold; up to the update, nothing has changed then.
        Raises `RankFailed` where another rank raised, and a rank's own error on that rank.
        """
        try:
            return self.launch(batch, rate, updates, stop=stop, save=save).result()
        except BaseException:
            self._gate.open()  # nothing is under way that it would have to hold back
            raise

    def launch(
        self, batch: GlobalBatch, rate: float, updates: int, *, stop: bool = False, save: bool = False
    ) -> Pending:
        """Begin the update that `__call__` describes; where it is judged late, do not wait for the device.

        Results are to be asked for in order, and what one raises ends the training: the updates launched after it did
        nothing. Raises as `__call__` does where nothing is judged late.
        """
        update = Pending(batch, rate, updates, checked=enforced(), late=self.late)
        gathered, partials = self._compute(update, stop=stop, save=save)
        if update.checked and self.audit.due(batch.step):
            audited = self.audit(batch.step, self._agreement, update.leaves, partials, gathered.payload)
            if self.late:
                self._gate.close_if(audited.differs())
            update.read(audited.gathered.table, audited.judge)
        self._reduce_and_clip(update, partials)
        if update.rows:
            self._backend.map(lambda index: self._replicas[index].apply())
        if update.checked:
            self._attest(update)
        if self.late:
            # After all that judges: a law that the host finds broken is to be said, and not that the gate was closed.
            update.read(self._gate.closed, _refuse_closed)
            update.end(self._backend.devices[0])
        return update

    def _judged(
        self,
        update: Pending,
        gathered: Gathered,
        judge: Callable[[Pending, Sequence[Observation]], None],
        held: torch.Tensor | None = None,
        want: laws.Reduced | None = None,
    ) -> None:
        """Judge what was gathered: now, or once it is read, and then the device holds it against what it must be."""
        if gathered.expected is not None:
            self._gate.look(gathered.said, gathered.expected, held, want)
        update.read(gathered.table, lambda table: judge(update, gathered.observations(table)))

    def _compute(self, update: Pending, *, stop: bool, save: bool) -> tuple[Gathered, list[PartialGradient]]:
        """Forward and backward everywhere, then one gather that says for every rank what it did, or that it failed."""
        step, roots = update.batch.step, self._reduce.roots_of_rank

        def gradients(index: int) -> PartialGradient | Exception:
            rank = self._backend.ranks[index]
            own = [update.leaves[leaf] for leaf in self._owners[rank]]
            try:
                return self._replicas[index].gradients(step, own, roots[rank], self._task, checked=update.checked)
            except Exception as error:  # noqa: BLE001 - a replica's own error must not hide another's result
                return error

        done: Sequence[PartialGradient | Exception]
        try:
            self.audit.prepare(step, checked=update.checked)
            parts = update.batch.micro_batches(self._micro_batches)
            update.plan = plan_leaves(parts, self._owners, self._task, checked=update.checked)
            update.rows, update.terms = len(update.batch.ids), sum(leaf.terms for leaf in update.plan)
            firsts = accumulate(map(len, parts), initial=0)
            update.leaves = [Leaf(index, next(firsts), part) for index, part in enumerate(parts)]
            done = self._backend.map(gradients)
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it before it is raised
            done = [error] * len(self._replicas)
        content = sum(leaf.content for leaf in update.plan)
        none = torch.empty((0, len(REPORT_FIELDS)), dtype=torch.int64)
        gathered = self._agreement.gather(
            step,
            "computed",
            [
                dict(zip(COMPUTED_FACTS, (isinstance(each, Exception), stop, save, content), strict=True))
                for each in done
            ],
            [
                padded(none.to(device) if isinstance(each, Exception) else each.reports, self._report_rows).flatten()
                for each, device in zip(done, self._backend.devices, strict=True)
            ],
            expected=self._expect_computed(update) if self.late else None,
        )
        self._judged(update, gathered, partial(self._judge_computed, done))
        partials = [
            replica.nothing() if isinstance(each, Exception) else each
            for replica, each in zip(self._replicas, done, strict=True)
        ]
        if self.late:
            own = [roots[rank] for rank in self._backend.ranks]
            partials = [r.completed(part, nodes) for r, part, nodes in zip(self._replicas, partials, own, strict=True)]
        return gathered, partials

    def _expect_computed(self, update: Pending) -> Expected:
        rules = {"failed": 0, **(rules_of(laws.PLANNED, None) if update.checked else {})}
        row = expected_row(rules, COMPUTED_FACTS)
        return [
            [*row, *planned_reports(update.plan, rank, self._report_rows, checked=update.checked)]
            for rank in range(self._backend.world_size)
        ]

    def _judge_computed(
        self, done: Sequence[PartialGradient | Exception], update: Pending, observations: Sequence[Observation]
    ) -> None:
        for each in done:
            if isinstance(each, Exception):
                raise each
        # First: in a message of another point of a step the same columns mean something else.
        enforce(Judgement((LOCKSTEP,), Seen(observations, None)))
        failed = [o.rank for o in observations if o.values["failed"]]
        if failed:
            msg = f"rank {failed[0]} failed in the forward or backward pass of step {update.batch.step}"
            raise RankFailed(msg)
        enforce(Judgement(laws.PLANNED, Seen(observations, None)))
        update.reports = reports_of(observations)
        update.stop = any(o.values["stop"] for o in observations)
        update.save = any(o.values["save"] for o in observations)
        if update.checked:
            enforce(Judgement(laws.LEAVES, laws.Leaves(update.reports, update.plan, update.batch.step)))

    def _reduce_and_clip(self, update: Pending, partials: Sequence[PartialGradient]) -> None:
        pieces = self._reduce([part.roots for part in partials])

        def take(index: int) -> torch.Tensor:
            # Without a term the sum is 0 as it is, and 0 / 0 would be none.
            replica, terms, limit = self._replicas[index], max(update.terms, 1), self._clip_norm
            facts = replica.take(pieces[index], terms, update.rate, limit, checked=update.checked)
            replica.release(partials[index])
            return facts

        facts = self._backend.map(take)
        if not update.checked:
            self._weights_there = None
            update.read(facts[0], partial(self._go_unchecked, update))
            return
        want = laws.Reduced(Rule.SAME if self._weights_there is None else Rule.PREVIOUS, self._clip_norm)
        rates = [dict(zip(RATES, (bits_of(update.rate), bits_of(each.rate)), strict=True)) for each in self._replicas]
        names = (*RATES, *REDUCED_FACTS)
        expected = self._agreement.expected(rules_of(laws.REDUCED, want), names) if self.late else None
        gathered = self._agreement.gather(update.batch.step, "reduced", rates, facts, REDUCED_FACTS, expected)
        self._judged(update, gathered, self._judge_reduced, self._weights_there, want)

    def _go_unchecked(self, update: Pending, norm: torch.Tensor) -> None:
        update.norm = float(norm.view(torch.float64)[0])
        self._weights = self._optimizer = None  # what is left behind without contracts, no later step can be held to

    def _judge_reduced(self, update: Pending, observations: Sequence[Observation]) -> None:
        size = self._replicas[0].parameters.size
        said = [replace(each, values=read_reduced(size, each.values)) for each in observations]
        want = laws.Reduced(Rule.SAME if self._weights is None else self._weights, self._clip_norm)
        looks = {"gradient": Replica.reduced_gradient, "weights": _weights}
        enforce(self._agreement.judgement(laws.REDUCED, Seen(said, want), looks))
        # Several ranks compare their moments after each update; a lone one only has what it left itself.
        if self._backend.world_size == 1 and not self.late and self._optimizer is not None:
            kept = {"optimizer": signed(self._replicas[0].optimizer_digest())}
            enforce(Judgement((laws.OPTIMIZER_UNCHANGED,), Seen([replace(said[0], values=kept)], self._optimizer)))
        update.norm = real_of(said[0].values["norm"])
        update.gradients = tuple(each.values["gradient"] for each in said)

    def _attest(self, update: Pending) -> None:
        """Digest what the update left on every rank, and agree on it."""
        facts = self._backend.map(lambda index: self._replicas[index].after_update())
        settings = self._replicas[0].settings
        names = update_facts(settings)
        rules = rules_for_facts(settings, rules_of(laws.UPDATED, update.updates)) if self.late else {}
        expected = self._agreement.expected(rules, names) if self.late else None
        gathered = self._agreement.gather(update.batch.step, "updated", [{} for _ in facts], facts, names, expected)
        # Kept on the device: the next update is held to it there before the host has read this one.
        self._weights_there = gathered.table[0, gathered.column("weights")] if self.late else None
        self._judged(update, gathered, self._judge_updated)

    def _judge_updated(self, update: Pending, observations: Sequence[Observation]) -> None:
        settings, size = self._replicas[0].settings, self._replicas[0].parameters.size
        said = [replace(each, values=read_state(settings, size, each.values)) for each in observations]
        looks = {"weights": _weights, "optimizer": Replica.optimizer_state}
        enforce(self._agreement.judgement(laws.UPDATED, Seen(said, update.updates), looks))
        self._weights, self._optimizer = said[0].values["weights"], said[0].values["optimizer"]
        update.ranks = tuple(
            {
                "gradient": gradient % UNSIGNED,
                "weights": each.values["weights"] % UNSIGNED,
                "optimizer": each.values["optimizer"] % UNSIGNED,
            }
            for gradient, each in zip(update.gradients, said, strict=True)
        )

    def attest_base(self, step: int, expected: int) -> None:
        """Every rank's frozen weights are still those of the start (digest `expected`). Raises `Violation`.

        To be called with no update under way.
        """
        if not enforced():
            return
        digests = self._backend.map(lambda index: self._replicas[index].base_digest())
        observed = [{"base": digest, "first base": expected} for digest in digests]
        observations = self._agreement.observe(step, laws.BASE_POINT, observed)
        enforce(self._agreement.judgement(laws.BASE, Seen(observations, None), {"base": Replica.frozen}))

    def attest_start(self, observed: Mapping[str, int]) -> None:
        """All ranks start from the same layout, weights, base and whatever else is `observed` (name to digest).

        To be called when everything is restored: the first update is held to these weights. Raises `Violation`.
        """
        values = [
            {"layout": r.layout_digest(), "weights": r.weights_digest(), "base": r.base_digest(), **observed}
            for r in self._replicas
        ]
        observations = self._agreement.observe(0, "start", values)
        enforce(Judgement(laws.START, Seen(observations, None)))
        self._weights = observations[0].values["weights"] if enforced() else None
        self._optimizer = signed(self._replicas[0].optimizer_digest()) if enforced() else None
        self._weights_there = None
        if self.late and enforced():
            # The raw sum, as ranks say it on their devices; digests are made of it by the host.
            self._weights_there = word_sums([self._replicas[0].weights_of_model()], finite=False)[0]


def _weights(replica: Replica) -> Mapping[str, torch.Tensor]:
    return replica.parameters.weight_views()


def _refuse_closed(closed: torch.Tensor) -> None:
    """The last reading of an update: nothing was found by a device that the host did not find."""
    if bool(closed):
        raise RuntimeError("the device refused an update for which the host finds no reason")
