"""The fixed binary tree along which gradients and losses are summed.

Floating-point addition is not associative, so the order of a sum is part of its result. Here the order is a function
of the number of micro-batches alone: a range [lo, hi) is the sum of [lo, mid) and [mid, hi) with mid = (lo + hi) // 2.
A rank that holds a contiguous run of leaves sums inside the largest subtrees that lie in its run and hands over only
their roots, at most 2 * ceil(log2(leaves)) of them; whoever holds all roots finishes the same tree.
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

    `leaf(i)` may return a buffer that the next leaf overwrites: `keep(x)` makes a left summand safe before its right
    sibling is computed. `add(left, right)` may overwrite `left`. At most ceil(log2(leaves)) kept values live at once.
    `seen(node, sum)` is shown every sum as it is computed, leaves included.
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
    """Sum `node` from the given subtree roots; `add` must not overwrite its arguments' roots.

    Raises `KeyError` where the roots do not cover the node.
    """
    if node in roots:
        return roots[node]
    low, high = node
    if high - low <= 1:
        raise KeyError(node)
    middle = (low + high) // 2
    return add(finish((low, middle), roots, add), finish((middle, high), roots, add))
