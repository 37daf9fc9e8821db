"""The audit: now and then, micro-batches that one rank computed are computed again by another, to the bit.

Replicas that agree say nothing of what all of them were given: a bit that flips in one rank's gradient before the
reduction reaches every rank alike. So at every K-th step each rank records digests of its micro-batches' gradients as
it computed them and of the partial sums that it is about to send. Another rank computes some of these micro-batches
again, from the same weights and the same keyed randomness, and sums them along the same tree; the sums of the rest it
takes from the audited rank. It has to come to the same bits (issue 3 item 7).

A flip in one of a rank's L gradients is found with the probability coverage / (K * L), one in a partial sum that is
sent with at least that. A rank that always computes one of them wrongly is found after K * L / coverage steps on
average. At one rank there is no other: it computes its own work again, which finds what passes, not what persists.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from andon.backend.base import Backend
from andon.step.agreement import Agreement
from andon.step.replica import Leaf, PartialGradient, Replica
from andon.step.task import Task
from andon.step.tree import Node, finish
from andon_contracts.agree import Observation, signed
from andon_contracts.judge import in_lockstep
from andon_contracts.observe import digest_of
from andon_contracts.policy import clause, ensure
from andon_contracts.violation import Finding

_PERCENT = 100


@dataclass(frozen=True)
class AuditSpec:
    """Audit every `every`-th step (0: never), `coverage` micro-batches of each rank (None: all); `seed` picks which."""

    every: int
    coverage: int | None = 1
    seed: int = 0

    def due(self, step: int) -> bool:
        """Whether `step` is audited."""
        return self.every > 0 and step % self.every == 0

    def chosen(self, step: int, rank: int, leaves: Sequence[int]) -> tuple[int, ...]:
        """The micro-batches of `rank` that are computed again at `step`: a draw that every rank makes alike."""
        if self.coverage is None or self.coverage >= len(leaves):
            return tuple(leaves)
        drawn = random.Random(f"andon audit {self.seed} {step} {rank}").sample(list(leaves), self.coverage)
        return tuple(sorted(drawn))


NO_AUDIT = AuditSpec(0)
"""Never."""


def default_every(world_size: int, micro_batches: int) -> int:
    """The K with which computing one micro-batch of each rank again is a hundredth of the work: ceil(100 W / M)."""
    return -(-_PERCENT * world_size // micro_batches)


def describe(spec: AuditSpec, world_size: int) -> str:
    """One line for a reader; at one rank it says what the audit cannot see."""
    if not spec.every:
        return "audit: off"
    share = "every micro-batch" if spec.coverage is None else f"{spec.coverage} of its micro-batches"
    if world_size == 1:
        return f"audit: every {spec.every} steps {share} again; one rank cannot see a persistent fault of its device"
    return f"audit: every {spec.every} steps another rank computes {share} of each rank again"


def siblings(node: Node, chosen: Sequence[int]) -> tuple[Node, ...]:
    """The largest subtrees of `node` without a leaf of `chosen`: what is taken over to sum `node` again."""
    low, high = node
    if not any(low <= leaf < high for leaf in chosen):
        return (node,)
    if high - low <= 1:
        return ()
    middle = (low + high) // 2
    return siblings((low, middle), chosen) + siblings((middle, high), chosen)


@dataclass(frozen=True)
class _Subject:
    """What is audited of one rank: its leaves, the roots above them, and the sums that are taken over."""

    rank: int
    chosen: tuple[int, ...]
    roots: tuple[Node, ...]
    kept: tuple[Node, ...]


@dataclass(frozen=True)
class _Found:
    """What an auditor found: how many gradients and sums differ, and the first of each with both digests."""

    leaves: int = 0
    leaf: int = -1
    leaf_digests: tuple[int, int] = (0, 0)
    sums: int = 0
    root: int = -1
    root_digests: tuple[int, int] = (0, 0)


class Audit:
    """Audits the partial gradients of all ranks, before they are reduced. Every rank calls it alike."""

    def __init__(
        self,
        spec: AuditSpec,
        backend: Backend,
        replicas: Sequence[Replica],
        task: Task,
        owners: Sequence[range],
        roots: Sequence[tuple[Node, ...]],
    ) -> None:
        """owners, roots: the micro-batches of each rank and the subtrees in which it sums them."""
        self.spec = spec
        self._backend = backend
        self._replicas = tuple(replicas)
        self._task = task
        self._owners = owners
        self._roots = roots
        self._kinds: tuple[int, ...] | None = None

    def subject(self, step: int, rank: int) -> _Subject:
        """What is audited of `rank` at `step`."""
        chosen = self.spec.chosen(step, rank, self._owners[rank])
        roots = tuple(node for node in self._roots[rank] if any(node[0] <= leaf < node[1] for leaf in chosen))
        return _Subject(rank, chosen, roots, tuple(kept for node in roots for kept in siblings(node, chosen)))

    def prepare(self, step: int, *, checked: bool) -> None:
        """Before gradients are computed: what each local replica is to record of them, if anything is `checked`."""
        due = checked and self.spec.due(step)
        for rank, replica in zip(self._backend.ranks, self._replicas, strict=True):
            replica.keeping = frozenset(self.subject(step, rank).kept) if due else None

    def __call__(
        self,
        step: int,
        agreement: Agreement,
        leaves: Sequence[Leaf],
        partials: Sequence[PartialGradient],
        digests: Mapping[int, int],
    ) -> tuple[Observation, ...]:
        """Audit every rank by another. Raises `Violation` (`audit`) on all ranks alike.

        leaves, digests: all micro-batches and, by index, the digests of their gradients as they were computed.
        Raises what computing again raises, on the rank where it does; the others learn that it failed.
        """
        subjects = [self.subject(step, rank) for rank in range(self._backend.world_size)]
        sums = self._sums(step, agreement, subjects, partials)
        auditors = self._auditors(step)
        taken = self._taken(subjects, partials, {auditors[rank] for rank in self._backend.ranks})

        def work(index: int) -> _Found | Exception:
            subject = subjects[auditors[self._backend.ranks[index]]]
            try:
                return self._again(index, step, subject, leaves, digests, sums[subject.rank], taken[subject.rank])
            except Exception as error:  # noqa: BLE001 - the other ranks must hear of it before it is raised
                return error

        done = self._backend.map(work)
        observed = [_values(result, auditors[rank]) for rank, result in zip(self._backend.ranks, done, strict=True)]
        observations = agreement.gather(step, "audited", observed)
        for result in done:
            if isinstance(result, Exception):
                raise result
        return tuple(judge_audit(observations))

    def _sums(
        self, step: int, agreement: Agreement, subjects: Sequence[_Subject], partials: Sequence[PartialGradient]
    ) -> list[list[int]]:
        """By rank, the digests of the audited roots as they are about to be sent."""
        most = max(len(subject.roots) for subject in subjects)
        local = []
        for rank, partial in zip(self._backend.ranks, partials, strict=True):
            found = [digest_of(partial.roots[node]) for node in subjects[rank].roots]
            local.append({f"sum {place}": value for place, value in enumerate(found + [0] * (most - len(found)))})
        gathered = agreement.gather(step, "partial sums", local)
        return [list(observation.values.values()) for observation in gathered]

    def _taken(
        self, subjects: Sequence[_Subject], partials: Sequence[PartialGradient], wanted: Collection[int]
    ) -> dict[int, dict[Node, torch.Tensor]]:
        """For each rank of `wanted`, the sums of what is not computed again, as that rank has them.

        One message for each, so that never more than one sum of every rank is held beside those that are wanted.
        """
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

    def _auditors(self, step: int) -> list[int]:
        """By auditor, the rank that it audits: another of the same kind of device, where there is one.

        The pairs change from audit to audit, so that a rank that is wrong is found out by several.
        """
        if self._kinds is None:
            mine = [torch.tensor([zlib.crc32(device.type.encode())], device=device) for device in self._backend.devices]
            self._kinds = tuple(int(kind) for kind in self._backend.gather(mine))
        found = [0] * len(self._kinds)
        for kind in set(self._kinds):
            alike = [rank for rank, each in enumerate(self._kinds) if each == kind]
            # Half a turn would pair ranks off, and of a pair nobody can tell which is wrong.
            turns = [turn for turn in range(1, len(alike)) if 2 * turn != len(alike) or turn == 1] or [0]
            turn = turns[step // max(self.spec.every, 1) % len(turns)]
            for place, rank in enumerate(alike):
                found[rank] = alike[(place + turn) % len(alike)]
        return found

    def _again(
        self,
        index: int,
        step: int,
        subject: _Subject,
        leaves: Sequence[Leaf],
        digests: Mapping[int, int],
        sums: Sequence[int],
        taken: Mapping[Node, torch.Tensor],
    ) -> _Found:
        replica = self._replicas[index]
        computed = {leaf: replica.gradient_of(step, leaves[leaf], self._task) for leaf in subject.chosen}
        odd = [(leaf, signed(digest_of(gradient))) for leaf, gradient in computed.items()]
        odd = [(leaf, now) for leaf, now in odd if now != signed(digests[leaf])]
        table = {node: tensor.to(replica.device) for node, tensor in taken.items()}
        table |= {(leaf, leaf + 1): gradient for leaf, gradient in computed.items()}
        again = [signed(digest_of(finish(node, table, torch.add))) for node in subject.roots]
        wrong = [place for place, now in enumerate(again) if now != signed(sums[place])]
        return _Found(
            leaves=len(odd),
            leaf=odd[0][0] if odd else -1,
            leaf_digests=(signed(digests[odd[0][0]]), odd[0][1]) if odd else (0, 0),
            sums=len(wrong),
            root=subject.roots[wrong[0]][0] if wrong else -1,
            root_digests=(signed(sums[wrong[0]]), again[wrong[0]]) if wrong else (0, 0),
        )


def _values(result: _Found | Exception, subject: int) -> dict[str, int]:
    found = result if isinstance(result, _Found) else _Found()
    return {
        "failed": isinstance(result, Exception),
        "subject": subject,
        "leaves": found.leaves,
        "leaf": found.leaf,
        "leaf then": found.leaf_digests[0],
        "leaf now": found.leaf_digests[1],
        "sums": found.sums,
        "root": found.root,
        "root then": found.root_digests[0],
        "root now": found.root_digests[1],
    }


def _odd(result: Sequence[Observation]) -> list[Observation]:
    return [each for each in result if each.values["leaves"] or each.values["sums"]]


def _explain(result: Sequence[Observation]) -> Finding:
    odd = _odd(result)
    first = odd[0]
    pairs = [{each.rank, each.values["subject"]} for each in odd]
    # Who is in every pair that disagrees is the culprit; of a single pair nobody can tell which.
    shared = set.intersection(*pairs) or set.union(*pairs)
    of, by = first.values["subject"], first.rank
    if first.values["leaves"]:
        what = f"gradient of micro-batch {first.values['leaf']}"
        then, now = first.values["leaf then"], first.values["leaf now"]
    else:
        what = f"partial sum from micro-batch {first.values['root']} on"
        then, now = first.values["root then"], first.values["root now"]
    whose = f"rank {by} computed again" if of == by else f"rank {by} gets"
    return Finding(
        seen=f"the {what} has digest {then % (1 << 64):016x} on rank {of}, {whose} {now % (1 << 64):016x}"
        + ("; either of both may be wrong" if len(shared) > 1 else ""),
        step=first.step,
        ranks=tuple(sorted(shared)),
        tensor=what,
        details=tuple((f"rank {each.values['subject']}", f"audited by rank {each.rank}") for each in odd),
    )


@clause("audit", _explain)
def recomputed_alike(result: Sequence[Observation]) -> bool:
    """What was computed again has the digests of what was computed first, gradients and partial sums."""
    return not _odd(result)


@ensure(recomputed_alike)
@ensure(in_lockstep)
def judge_audit(observations: Sequence[Observation]) -> Sequence[Observation]:
    """Every audited micro-batch and partial sum is what another rank makes of it. Raises `Violation`."""
    return observations
