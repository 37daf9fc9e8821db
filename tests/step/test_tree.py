"""The fixed tree: one order of summation for every distribution of leaves over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.step.plan import rank_leaves
from andon.step.reduce import finish, fold, subtree_roots


def written_out(leaves: list[str]) -> str:
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return f"({written_out(leaves[:half])}{written_out(leaves[half:])})"


def joined(left: str, right: str) -> str:
    return f"({left}{right})"


def letters(count: int) -> list[str]:
    return [chr(0x100 + index) for index in range(count)]


runs = st.integers(1, 200).flatmap(
    lambda leaves: st.tuples(st.just(leaves), st.integers(0, leaves), st.integers(0, leaves))
)


@given(runs)
def test_roots_partition_any_run(run: tuple[int, int, int]) -> None:
    leaves, start, end = run
    roots = subtree_roots((0, leaves), start, end)
    assert [leaf for low, high in roots for leaf in range(low, high)] == list(range(start, end))
    assert len(roots) <= max(1, 2 * ceil(log2(leaves)))


def test_roots_by_hand() -> None:
    assert subtree_roots((0, 8), 3, 6) == ((3, 4), (4, 6))
    assert subtree_roots((0, 8), 0, 8) == ((0, 8),)
    assert subtree_roots((0, 8), 2, 2) == ()
    assert subtree_roots((0, 0), 0, 0) == ()


@dataclass
class Buffer:
    """A tensor's place: what it holds, and whether it is in use."""

    held: str


class Buffers:
    """One buffer that every leaf overwrites, and copies that are counted while they live."""

    def __init__(self, leaves: list[str]) -> None:
        self.leaves = leaves
        self.scratch = Buffer("")
        self.live = 0
        self.most = 0
        self.computed: list[int] = []

    def leaf(self, index: int) -> Buffer:
        self.computed.append(index)
        self.scratch.held = self.leaves[index]
        return self.scratch

    def keep(self, value: Buffer) -> Buffer:
        if value is not self.scratch:
            return value
        self.live += 1
        self.most = max(self.most, self.live)
        return Buffer(value.held)

    def add(self, left: Buffer, right: Buffer) -> Buffer:
        assert left is not self.scratch
        left.held = joined(left.held, right.held)
        if right is not self.scratch:
            self.live -= 1
        return left


@given(st.integers(1, 300))
def test_fold_needs_few_buffers(count: int) -> None:
    buffers = Buffers(letters(count))
    total = fold((0, count), buffers.leaf, buffers.add, buffers.keep)
    assert total.held == written_out(buffers.leaves)
    assert fold((0, 3), "abc".__getitem__, joined, str) == "(a(bc))"
    assert buffers.computed == list(range(count))
    assert buffers.most <= ceil(log2(count)) if count > 1 else buffers.most == 0


@given(st.integers(1, 120), st.integers(1, 130))
def test_ranks_together_finish_the_same_tree(count: int, world: int) -> None:
    leaves = letters(count)
    table = {
        node: fold(node, leaves.__getitem__, joined, str)
        for run in rank_leaves(count, world)
        for node in subtree_roots((0, count), run.start, run.stop)
    }
    assert finish((0, count), table, joined) == written_out(leaves)


def test_a_missing_root_is_an_error() -> None:
    with pytest.raises(KeyError):
        finish((0, 4), {(0, 2): "ab", (2, 3): "c"}, joined)
