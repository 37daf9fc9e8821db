"""The audit: now and then, another rank recomputes micro-batches of each rank, and must get the same bits.

Replicas that agree may all have received the same wrong value: a bit that flips in one rank's gradient before the
reduction reaches every rank alike. So at every K-th step each rank records digests of its micro-batches' gradients and
of the partial sums that it is about to send. Another rank recomputes some of the micro-batches, from the same weights
and the same keyed randomness, and sums them along the same tree; the audited rank sends it the sums of the others.

A flip in one of a rank's L gradients is found with the probability coverage / (K * L), one in a partial sum with at
least that. A rank that always computes one of them wrongly is found after K * L / coverage steps on average. A lone
rank recomputes its own work, which finds passing faults, not persistent ones.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from andon.backend.base import Backend
from andon.config.schema import Contracts
from andon.step.agreement import Agreement, Gathered, RankFailed
from andon.step.message import REPORT, WIDTH
from andon.step.micro_batch import Leaf
from andon.step.reduce import Node, finish
from andon.step.replica import PartialGradient, Replica
from andon.step.task import Task
from andon_contracts.agree import Observation
from andon_contracts.digest import word_sum_tensor
from andon_contracts.laws.law import Seen

NO_AUDIT = Contracts(audit_every=0)


def default_every(world_size: int, micro_batches: int) -> int:
    """The K with which recomputing one micro-batch of each rank is a hundredth of the work: ceil(100 W / M)."""
    return -(-100 * world_size // micro_batches)


def siblings(node: Node, chosen: Sequence[int]) -> tuple[Node, ...]:
    """The largest subtrees of `node` without a leaf of `chosen`: the sums that an auditor needs for `node`."""
    low, high = node
    if not any(low <= leaf < high for leaf in chosen):
        return (node,)
    if high - low <= 1:
        return ()
    middle = (low + high) // 2
    return siblings((low, middle), chosen) + siblings((middle, high), chosen)


@dataclass(frozen=True)
class _Subject:
    """What is audited of one rank: its leaves, the roots above them, and the sums that its auditor receives."""

    rank: int
    chosen: tuple[int, ...]
    roots: tuple[Node, ...]
    kept: tuple[Node, ...]


@dataclass(frozen=True)
class Audited:
    """What the auditors send, what they audited, and by local replica the error that recomputing raised."""

    gathered: Gathered
    subjects: tuple[_Subject, ...]
    errors: tuple[Exception | None, ...]

    def differs(self) -> torch.Tensor:
        """0-dim bool on the device: whether an auditor failed, or came to another word sum."""
        then, now = self.gathered.payload.chunk(2, dim=1)
        return (then != now).any() | self.gathered.column("failed").any()

    def record(self, table: torch.Tensor) -> Seen[None]:
        """What each auditor found, from the gathered table on the CPU. Raises the error of a local replica."""
        for error in self.errors:
            if error is not None:
                raise error
        observations = self.gathered.observations(table)
        return Seen([replace(each, values=self._differences(each)) for each in observations], None)

    def _differences(self, observation: Observation) -> dict[str, int]:
        """An auditor's values: how many gradients and sums differ, and the first of each with both word sums."""
        found = dict.fromkeys(("leaves", "sums", "leaf then", "leaf now", "root then", "root now"), 0)
        values = {**observation.values, **found, "leaf": -1, "root": -1}
        if not observation.names_match or observation.payload is None or values["failed"]:
            return values
        subject = self.subjects[values["subject"]]
        then, now = observation.payload.view(2, -1).tolist()
        leaves = max(len(each.chosen) for each in self.subjects)
        odd = [place for place in range(len(then)) if then[place] != now[place]]
        wrong, sums = [place for place in odd if place < leaves], [place for place in odd if place >= leaves]
        values |= {"leaves": len(wrong), "sums": len(sums)}
        if wrong:
            values |= {"leaf": subject.chosen[wrong[0]], "leaf then": then[wrong[0]], "leaf now": now[wrong[0]]}
        if sums:
            root = subject.roots[sums[0] - leaves][0]
            values |= {"root": root, "root then": then[sums[0]], "root now": now[sums[0]]}
        return values

    def refuse_failed(self, seen: Seen[None]) -> None:
        """Raise `RankFailed` if recomputing raised on another rank."""
        failed = [each.rank for each in seen.observations if each.values["failed"]]
        if failed:
            raise RankFailed(f"rank {failed[0]} failed in the audit of step {self.gathered.step}")


class Audit:
    """Audits the partial gradients of all ranks, before they are reduced. Every rank calls it alike."""

    def __init__(
        self,
        contracts: Contracts,
        backend: Backend,
        replicas: Sequence[Replica],
        task: Task,
        owners: Sequence[range],
        roots: Sequence[tuple[Node, ...]],
    ) -> None:
        """owners, roots: the micro-batches of each rank and the subtrees in which it sums them."""
        every, self.coverage = contracts.audit_every, contracts.audit_coverage
        self.every = default_every(backend.world_size, sum(map(len, owners))) if every is None else every
        self._seed = replicas[0].seed
        self._backend = backend
        self._replicas = tuple(replicas)
        self._task = task
        self._owners = owners
        self._roots = roots
        self._kinds: tuple[int, ...] | None = None

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def chosen(self, step: int, rank: int, leaves: Sequence[int]) -> tuple[int, ...]:
        """The micro-batches of `rank` that are recomputed at `step`: the same draw on every rank."""
        if self.coverage == "all" or self.coverage >= len(leaves):
            return tuple(leaves)
        draw = random.Random(f"andon audit {self._seed} {step} {rank}")
        return tuple(sorted(draw.sample(list(leaves), self.coverage)))

    def describe(self) -> str:
        """One line for a reader; at one rank it says what the audit cannot see."""
        if not self.every:
            return "audit: off"
        share = "every micro-batch" if self.coverage == "all" else f"{self.coverage} of its micro-batches"
        when = f"audit: every {self.every} steps"
        if self._backend.world_size == 1:
            return f"{when} {share} again; one rank cannot see a persistent fault of its device"
        return f"{when} another rank computes {share} of each rank again"

    def _subject(self, step: int, rank: int) -> _Subject:
        chosen = self.chosen(step, rank, self._owners[rank])
        roots = tuple(node for node in self._roots[rank] if any(node[0] <= leaf < node[1] for leaf in chosen))
        return _Subject(rank, chosen, roots, tuple(kept for node in roots for kept in siblings(node, chosen)))

    def prepare(self, step: int, *, checked: bool) -> None:
        """Must be called before gradients are computed: tell each local replica which sums to copy."""
        due = checked and self.due(step)
        for rank, replica in zip(self._backend.ranks, self._replicas, strict=True):
            replica.keeping = frozenset(self._subject(step, rank).kept) if due else None

    def __call__(
        self,
        step: int,
        agreement: Agreement,
        leaves: Sequence[Leaf],
        partials: Sequence[PartialGradient],
        reported: torch.Tensor,
    ) -> Audited:
        """Audit every rank by another, without waiting for a device.

        leaves: all micro-batches. reported: int64 [world, reports * WIDTH], the reports of all ranks.
        """
        ranks, devices = self._backend.ranks, self._backend.devices
        subjects = tuple(self._subject(step, rank) for rank in range(self._backend.world_size))
        most_leaves, most_roots = max(len(s.chosen) for s in subjects), max(len(s.roots) for s in subjects)
        # The word sums of the audited roots that each rank is about to send, int64 [world, most roots].
        local = [
            _filled([word_sum_tensor(partial.roots[node]) for node in subjects[rank].roots], most_roots, device)
            for rank, partial, device in zip(ranks, partials, devices, strict=True)
        ]
        sums = agreement.gather(step, "partial sums", [{} for _ in local], local).payload
        audited = self._audited_ranks(step)
        copies = self._copies(subjects, partials, {audited[rank] for rank in ranks})

        def work(index: int) -> torch.Tensor | Exception:
            subject, replica = subjects[audited[ranks[index]]], self._replicas[index]
            try:
                computed = [replica.gradient_of(step, leaves[leaf], self._task) for leaf in subject.chosen]
                table = {node: tensor.to(replica.device) for node, tensor in copies[subject.rank].items()}
                table |= {(leaf, leaf + 1): own for leaf, own in zip(subject.chosen, computed, strict=True)}
                roots = [word_sum_tensor(finish(node, table, torch.add)) for node in subject.roots]
            except Exception as error:  # noqa: BLE001 - the other ranks must hear of it before it is raised
                return error
            own = reported[subject.rank].view(-1, WIDTH)[:, REPORT.names.index("gradient")]
            then = [own[leaf - self._owners[subject.rank].start] for leaf in subject.chosen]
            now, device = list(map(word_sum_tensor, computed)), devices[index]
            # The word sums of leaves and roots then, and in the same order now; as many on all ranks.
            parts = _filled(then, most_leaves, device), sums[subject.rank].to(device)
            return torch.cat([*parts, _filled(now, most_leaves, device), _filled(roots, most_roots, device)])

        done = self._backend.map(work)
        errors = tuple(each if isinstance(each, Exception) else None for each in done)
        observed = [
            {"failed": error is not None, "subject": audited[rank]} for rank, error in zip(ranks, errors, strict=True)
        ]
        facts = [
            _filled([], 2 * (most_leaves + most_roots), device) if isinstance(each, Exception) else each
            for each, device in zip(done, devices, strict=True)
        ]
        return Audited(agreement.gather(step, "audited", observed, facts), subjects, errors)

    def _copies(
        self, subjects: Sequence[_Subject], partials: Sequence[PartialGradient], wanted: set[int]
    ) -> dict[int, dict[Node, torch.Tensor]]:
        """For each rank of `wanted`, its copies of the sums that are not recomputed."""
        # One gather for each sum, so that a rank never holds more than one of every other rank at once.
        found: dict[int, dict[Node, torch.Tensor]] = {rank: {} for rank in wanted}
        for place in range(max(len(subject.kept) for subject in subjects)):
            local = []
            for rank, partial, replica in zip(self._backend.ranks, partials, self._replicas, strict=True):
                nodes = subjects[rank].kept
                local.append(partial.kept[nodes[place]] if place < len(nodes) else replica.parameters.gradient)
            for rank, tensor in enumerate(self._backend.gather(local)):
                if rank in found and place < len(subjects[rank].kept):
                    found[rank][subjects[rank].kept[place]] = tensor.clone()  # a view would hold those of all ranks
        return found

    def _audited_ranks(self, step: int) -> list[int]:
        """By auditor, the rank that it audits: another of the same kind of device, if there is one.

        The pairs change from audit to audit, so that several ranks find out a wrong one.
        """
        if self._kinds is None:
            # By rank, a number for its kind of device. Only `mixed` has two.
            self._kinds = (0,) * self._backend.world_size
            if self._backend.name not in ("gloo", "nccl"):
                mine = [torch.tensor([zlib.crc32(d.type.encode())], device=d) for d in self._backend.devices]
                self._kinds = tuple(int(kind) for kind in self._backend.gather(mine))
        found = [0] * len(self._kinds)
        for kind in set(self._kinds):
            alike = [rank for rank, each in enumerate(self._kinds) if each == kind]
            # Half a turn would pair ranks off, and a pair does not show which of the two is wrong.
            turns = [turn for turn in range(1, len(alike)) if 2 * turn != len(alike) or turn == 1] or [0]
            turn = turns[step // max(self.every, 1) % len(turns)]
            for place, rank in enumerate(alike):
                found[rank] = alike[(place + turn) % len(alike)]
        return found


def _filled(found: Sequence[torch.Tensor], count: int, device: torch.device) -> torch.Tensor:
    """int64 [count]: `found` and zeros."""
    stacked = [torch.stack([each.to(device) for each in found])] if found else []
    return torch.cat([*stacked, torch.zeros(count - len(found), dtype=torch.int64, device=device)])
