"""The exact reduction: M gradients summed along one fixed binary tree, independent of the number of ranks.

Floating-point addition is not associative, so the order of a sum changes its result. Here the order depends only on the
number of micro-batches: a range [lo, hi) is the sum of [lo, mid) and [mid, hi) with mid = (lo + hi) // 2. Each rank has
a contiguous run of leaves and sums the largest subtrees within its run, at most 2 * ceil(log2(leaves)) of them. It
sends slice d of their roots to rank d, which finishes the tree on its slice. Then the slices are all-gathered. The
traffic is that of an all-reduce, but the collectives only copy bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from andon.backend.base import Backend
from andon.step.plan import rank_leaves

Node = tuple[int, int]
Roots = Mapping[Node, torch.Tensor]
T = TypeVar("T")


def subtree_roots(node: Node, start: int, end: int) -> tuple[Node, ...]:
    """The largest subtrees of `node` whose leaves all lie in [start, end), from left to right."""
    low, high = node
    if start <= low and high <= end:
        return (node,) if low < high else ()
    if high <= start or end <= low or high - low <= 1:
        return ()
    middle = (low + high) // 2
    return subtree_roots((low, middle), start, end) + subtree_roots((middle, high), start, end)


def fold(
    node: Node,
    leaf: Callable[[int], T],
    add: Callable[[T, T], T],
    keep: Callable[[T], T],
    seen: Callable[[Node, T], None] | None = None,
    known: Mapping[Node, T] | None = None,
) -> T:
    """Sum the leaves of `node` along the tree, computing them from left to right.

    `leaf(i)` may return a buffer that the next leaf overwrites: `keep(x)` saves a left summand before its right sibling
    is computed. `add(left, right)` may overwrite `left`. At most ceil(log2(leaves)) kept values exist at once.
    `seen(node, sum)` is called with every sum, leaves included. known: sums that are not computed.
    """
    low, high = node
    if known is not None and node in known:
        return known[node]
    if high - low == 1:
        value = leaf(low)
    else:
        middle = (low + high) // 2
        left = keep(fold((low, middle), leaf, add, keep, seen, known))
        value = add(left, fold((middle, high), leaf, add, keep, seen, known))
    if seen is not None:
        seen(node, value)
    return value


def finish(node: Node, roots: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
    """Sum `node` from subtree roots, which `add` must not overwrite. Raises `KeyError` if they do not cover it."""
    if node in roots:
        return roots[node]
    low, high = node
    if high - low <= 1:
        raise KeyError(node)
    middle = (low + high) // 2
    return add(finish((low, middle), roots, add), finish((middle, high), roots, add))


class TreeReduction:
    """Sums flat tensors [size] over `leaves` micro-batches. Independent of model and optimizer."""

    def __init__(self, leaves: int, size: int, backend: Backend) -> None:
        """leaves: M. size: elements of the flat tensor. Raises `ValueError` if either is below 1."""
        if leaves < 1 or size < 1:
            raise ValueError(f"nothing to reduce: {leaves} leaves of {size} elements")
        self.leaves = leaves
        self.size = size
        self._backend = backend
        # Rounded up, because collectives need slices of equal length.
        self._width = -(-size // backend.world_size)
        self.roots_of_rank = tuple(
            subtree_roots((0, leaves), run.start, run.stop) for run in rank_leaves(leaves, backend.world_size)
        )

    def __call__(self, local: Sequence[Roots]) -> list[list[torch.Tensor]]:
        """Reduce each local replica's subtree roots to the sum over all leaves.

        Returns for each local replica the pieces whose concatenation is the sum [size]: one piece for one rank, else a
        slice from every rank (the last slices may be shorter or empty). Pieces are read-only.
        """
        if self._backend.world_size == 1:
            # A single rank has summed the whole tree already, in the same order.
            return [[local[0][(0, self.leaves)]]]
        counts = [len(roots) for roots in self.roots_of_rank]
        sent = []
        for roots, rank, device in zip(local, self._backend.ranks, self._backend.devices, strict=True):
            # [world, roots of this rank, width], zero-padded at the end.
            out = torch.zeros((len(counts), counts[rank], self._width), device=device)
            for row, node in enumerate(self.roots_of_rank[rank]):
                for destination, piece in enumerate(torch.split(roots[node], self._width)):
                    out[destination, row, : piece.numel()] = piece
            sent.append(out)
        slices = [self._finish(received) for received in self._backend.exchange(sent, counts)]
        pieces = self._backend.gather(slices)
        lengths = [max(0, min(self._width, self.size - rank * self._width)) for rank in range(len(pieces))]
        whole = [piece[:length] for piece, length in zip(pieces, lengths, strict=True)]
        return [[piece.to(device) for piece in whole] for device in self._backend.devices]

    def bucket_into(self, out: torch.Tensor | None, roots: Roots, start: int, width: int) -> None:
        """Sum a bucket over all leaves and write this rank's piece to `out` (None: it has none). For one local rank."""
        rank, world = self._backend.ranks[0], self._backend.world_size
        rows = [roots[n][start : start + world * width].view(world, 1, width) for n in self.roots_of_rank[rank]]
        # A single root is sent from where it is.
        none = torch.empty((world, 0, width), device=self._backend.devices[0])
        sent = rows[0] if len(rows) == 1 else torch.cat([none, *rows], dim=1)
        (received,) = self._backend.exchange([sent], [len(nodes) for nodes in self.roots_of_rank])
        if out is not None:
            out.copy_(self._finish(received)[: out.numel()])

    def _finish(self, received: Sequence[torch.Tensor]) -> torch.Tensor:
        table = {
            node: part[row]
            for nodes, part in zip(self.roots_of_rank, received, strict=True)
            for row, node in enumerate(nodes)
        }
        return finish((0, self.leaves), table, torch.add)
