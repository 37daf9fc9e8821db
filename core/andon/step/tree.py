"""The fixed binary tree along which gradients and losses are summed.

Floating-point addition is not associative, so the order of a sum is part of its result. Here the order depends on the
number of micro-batches alone: a range [lo, hi) is the sum of [lo, mid) and [mid, hi) with mid = (lo + hi) // 2. A rank
that has a contiguous run of leaves sums inside the largest subtrees of its run and sends their roots, at most
2 * ceil(log2(leaves)) of them. A rank that has all roots finishes the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Node = tuple[int, int]
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
) -> T:
    """Sum the leaves of `node` along the tree, computing them from left to right.

    `leaf(i)` may return a buffer that the next leaf overwrites: `keep(x)` saves a left summand before its right sibling
    is computed. `add(left, right)` may overwrite `left`. At most ceil(log2(leaves)) kept values exist at once.
    `seen(node, sum)` is called with every sum, leaves included.
    """
    low, high = node
    if high - low == 1:
        value = leaf(low)
    else:
        middle = (low + high) // 2
        left = keep(fold((low, middle), leaf, add, keep, seen))
        value = add(left, fold((middle, high), leaf, add, keep, seen))
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
