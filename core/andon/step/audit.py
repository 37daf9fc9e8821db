"""The audit: every K steps, another rank recomputes some micro-batches of each rank and must get the same bits.

Agreement between replicas does not detect every fault: a bit that flips in one rank's gradient before the reduction
reaches all ranks. So at every K-th step each rank records digests of its micro-batches' gradients and of the partial
sums that it will send. Its auditor, another rank, recomputes some of the micro-batches from the same weights and
randomness, and sums them along the same tree. The audited rank sends it the sums of the other micro-batches.

A single flip in one of a rank's L gradients is detected with probability coverage / (K * L), and one in a partial sum
with at least that. A rank that always computes one gradient wrongly is detected after K * L / coverage steps on
average. The only rank of a world audits itself, which detects transient faults but not persistent ones.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from andon.backend.base import Backend
from andon.config.schema import Contracts
from andon.step import flat
from andon.step.agreement import Agreement, Gathered, RankFailed
from andon.step.message import REPORT, WIDTH
from andon.step.micro_batch import Leaf, Task
from andon.step.reduce import Node
from andon.step.replica import PartialGradient, Replica
from andon_contracts.agree import Observation
from andon_contracts.digest import word_sum_tensor
from andon_contracts.laws.law import Law, Seen
from andon_contracts.violation import Finding

NO_AUDIT = Contracts(audit_every=0)


def default_every(world_size: int, micro_batches: int) -> int:
    """The K at which recomputing one micro-batch per rank costs 1 % of the work: ceil(100 * world size / M)."""
    return -(-100 * world_size // micro_batches)


def siblings(node: Node, chosen: Sequence[int]) -> tuple[Node, ...]:
    """The largest subtrees of `node` without a leaf of `chosen`: the sums an auditor of `node` must receive."""
    low, high = node
    if not any(low <= leaf < high for leaf in chosen):
        return (node,)
    if high - low <= 1:
        return ()
    middle = (low + high) // 2
    return siblings((low, middle), chosen) + siblings((middle, high), chosen)


@dataclass(frozen=True)
class _Subject:
    """The audited part of one rank: micro-batches, their subtree roots, and the sums that its auditor receives."""

    rank: int
    chosen: tuple[int, ...]
    roots: tuple[Node, ...]
    kept: tuple[Node, ...]


@dataclass(frozen=True)
class Audited:
    """The auditors' messages, the audited subjects, and for each local replica the error of its recomputation."""

    gathered: Gathered
    subjects: tuple[_Subject, ...]
    errors: tuple[Exception | None, ...]

    def differs(self) -> torch.Tensor:
        """0-dim bool on the device: whether an auditor failed or got a different word sum."""
        then, now = self.gathered.payload.chunk(2, dim=1)
        return (then != now).any() | self.gathered.column("failed").any()

    def record(self, table: torch.Tensor) -> Seen[None]:
        """Each auditor's differences, from the gathered table on the CPU. Raises a local replica's own error."""
        for error in self.errors:
            if error is not None:
                raise error
        observations = self.gathered.observations(table)
        return Seen([replace(each, values=self._differences(each)) for each in observations], None)

    def _differences(self, observation: Observation) -> dict[str, int]:
        zeros = dict.fromkeys(("leaves", "sums", "leaf then", "leaf now", "root then", "root now"), 0)
        values = {**observation.values, **zeros, "leaf": -1, "root": -1}
        if not observation.names_match or observation.payload is None or values["failed"]:
            return values
        subject = self.subjects[values["subject"]]
        then, now = observation.payload.view(2, -1).tolist()
        leaves = max(len(each.chosen) for each in self.subjects)
        unequal = [place for place in range(len(then)) if then[place] != now[place]]
        wrong, sums = [place for place in unequal if place < leaves], [place for place in unequal if place >= leaves]
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
    """Audits the partial gradients of all ranks before they are reduced. All ranks must make the same calls."""

    def __init__(
        self,
        contracts: Contracts,
        backend: Backend,
        replicas: Sequence[Replica],
        task: Task,
        owners: Sequence[range],
        roots: Sequence[tuple[Node, ...]],
    ) -> None:
        """owners: the micro-batches of each rank. roots: the subtrees in which each rank sums them."""
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
        """The micro-batches of `rank` to recompute at `step`. Every rank draws the same ones."""
        if self.coverage == "all" or self.coverage >= len(leaves):
            return tuple(leaves)
        draw = random.Random(f"andon audit {self._seed} {step} {rank}")
        return tuple(sorted(draw.sample(list(leaves), self.coverage)))

    def describe(self) -> str:
        """One line for the log. With one rank it adds what the audit cannot detect."""
        if not self.every:
            return "audit: off"
        share = "every micro-batch" if self.coverage == "all" else f"{self.coverage} of its micro-batches"
        when = f"audit: every {self.every} steps"
        if self._backend.world_size == 1:
            return f"{when} the rank recomputes {share}; it cannot detect a permanent fault of its own device"
        return f"{when} each rank recomputes {share.replace('its', 'the')} of another rank"

    def _subject(self, step: int, rank: int) -> _Subject:
        chosen = self.chosen(step, rank, self._owners[rank])
        roots = tuple(node for node in self._roots[rank] if any(node[0] <= leaf < node[1] for leaf in chosen))
        return _Subject(rank, chosen, roots, tuple(kept for node in roots for kept in siblings(node, chosen)))

    def prepare(self, step: int, *, checked: bool) -> None:
        """Tell each local replica which sums to copy. Must be called before its gradients are computed."""
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
        """Have every rank audited by another, without waiting for a device.

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
        copies = self._copies(subjects, partials, [audited[rank] for rank in ranks])

        def work(index: int) -> torch.Tensor | Exception:
            subject, replica = subjects[audited[ranks[index]]], self._replicas[index]
            try:
                own_leaves = [leaves[leaf] for leaf in subject.chosen]
                now, roots = replica.recomputed(step, own_leaves, subject.roots, copies[index], self._task)
            except Exception as error:  # noqa: BLE001 - the other ranks must be notified before it is raised
                return error
            own = reported[subject.rank].view(-1, WIDTH)[:, REPORT.names.index("gradient")]
            then = [own[leaf - self._owners[subject.rank].start] for leaf in subject.chosen]
            device = devices[index]
            # The recorded word sums of leaves and roots, then the recomputed ones; equally many on all ranks.
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

    def subject_of(self, step: int) -> int:
        """The rank that the first local rank audits."""
        return self._audited_ranks(step)[self._backend.ranks[0]]

    def _copies(
        self, subjects: Sequence[_Subject], partials: Sequence[PartialGradient], wanted: Sequence[int]
    ) -> list[dict[Node, torch.Tensor]]:
        """For each local replica, the sums of the rank `wanted` that it does not recompute."""
        copies: list[dict[Node, torch.Tensor]] = [{} for _ in wanted]
        for index in range(max(len(subject.kept) for subject in subjects)):
            buffers = []
            for rank, partial, replica in zip(self._backend.ranks, partials, self._replicas, strict=True):
                nodes = subjects[rank].kept
                known = partial.kept.pop(nodes[index]) if index < len(nodes) else None
                buffers.append(torch.empty_like(replica.parameters.gradient) if known is None else known)
            # By chunks, so that a rank writes what it receives over what it has sent.
            for chunks in zip(*(torch.split(buffer, flat.BLOCK) for buffer in buffers), strict=True):
                received = torch.stack(self._backend.gather(chunks))
                for chunk, rank in zip(chunks, wanted, strict=True):
                    chunk.copy_(received[rank])
            for own, rank, buffer in zip(copies, wanted, buffers, strict=True):
                if index < len(subjects[rank].kept):
                    own[subjects[rank].kept[index]] = buffer
        return copies

    def _audited_ranks(self, step: int) -> list[int]:
        """For each auditor, the rank that it audits: another one with the same type of device, if there is one.

        The pairing changes from audit to audit, so that several auditors detect the same faulty rank.
        """
        if self._kinds is None:
            # A number for each rank's device type. Only `mixed` has two types.
            self._kinds = (0,) * self._backend.world_size
            if self._backend.name not in ("gloo", "nccl"):
                mine = [torch.tensor([zlib.crc32(d.type.encode())], device=d) for d in self._backend.devices]
                self._kinds = tuple(int(kind) for kind in self._backend.gather(mine))
        audited = [0] * len(self._kinds)
        for kind in set(self._kinds):
            same_type = [rank for rank, each in enumerate(self._kinds) if each == kind]
            # A shift by half pairs ranks with each other, and a pair does not show which of the two is wrong.
            shifts = [shift for shift in range(1, len(same_type)) if 2 * shift != len(same_type) or shift == 1] or [0]
            shift = shifts[step // max(self.every, 1) % len(shifts)]
            for place, rank in enumerate(same_type):
                audited[rank] = same_type[(place + shift) % len(same_type)]
        return audited


def _audited_updates(seen: Seen[None]) -> Finding | None:
    by_rank = {each.rank: each.values for each in seen.observations}
    odd = [
        (auditor, values["subject"], name.removeprefix("again "))
        for auditor, values in by_rank.items()
        for name, again in values.items()
        if name.startswith("again ") and again != by_rank[values["subject"]][name.replace("again", "own", 1)]
    ]
    if not odd:
        return None
    (auditor, subject, name), pairs = odd[0], [{auditor, subject} for auditor, subject, _ in odd]
    culprits = set.intersection(*pairs) or set.union(*pairs)
    unsure = "; either of the two ranks may be wrong" * (len(culprits) > 1)
    what = f"rank {auditor} gets other {name} if it recomputes the update of rank {subject}'s slice{unsure}"
    return Finding(what, seen.step, tuple(sorted(culprits)), name)


UPDATE_AUDITED = Law("audit/updated", ("subject",), _audited_updates)


def _filled(values: Sequence[torch.Tensor], count: int, device: torch.device) -> torch.Tensor:
    stacked = [torch.stack([each.to(device) for each in values])] if values else []
    return torch.cat([*stacked, torch.zeros(count - len(values), dtype=torch.int64, device=device)])
