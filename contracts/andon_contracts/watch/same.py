"""`andon.assert_same`: compares a tree of tensors and values on all ranks, and reports which ranks differ where."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from andon_contracts.act import Scene, with_message
from andon_contracts.agree import GroupGather, by_rank, minority, own_group
from andon_contracts.digest import hex64, tensor_digest
from andon_contracts.laws.law import Judgement, Law, Seen
from andon_contracts.observe import plain
from andon_contracts.violation import Finding
from andon_contracts.watch.exchange import WIDTH, Exchange
from andon_contracts.watch.settings import Settings, as_duration
from andon_contracts.watch.values import text_digest, value_digest

_SHOWN, _BEFORE, _MOST = 60, 20, 1 << 16
"""Characters of a value: shown, shown before the first difference, and compared."""


def _tree_law(name: str, *, stops: bool = False) -> Law[Seen[object]]:
    def check(seen: Seen[object]) -> Finding | None:
        if name not in seen.differing:
            return None
        # Until the details are gathered, only the digest of all of them is known.
        columns = seen.details.get(name, {name: seen.column(name)})
        odd = [each for each, column in columns.items() if len(set(column)) > 1]
        what = "the trees have different leaves" if name == "places" else f"{len(odd)} of {len(columns)} leaves differ"
        details = tuple((each, " ".join(map(hex64, columns[each]))) for each in odd)
        return Finding(what, seen.step, minority(columns[odd[0]]), odd[0], details, likely="")

    return Law(f"trees-agree/{name}", (name,), check, stops=stops)


_TREE = (_tree_law("places", stops=True), _tree_law("leaves"))
"""Every rank's tree has the same leaves, in the same order, with the same bits."""


def assert_same(
    tree: Any, *, group: dist.ProcessGroup | None = None, timeout: datetime.timedelta | float = Settings.timeout
) -> None:
    """Check that every rank has the same `tree`, to the bit. Collective.

    tree: tensors, modules, optimizers, mappings, sequences and plain values, nested. Raises `Violation` of
    `trees-agree` on every rank, with the leaf, the ranks in the minority and the first differing element (of a value:
    the value of each rank; of a leaf that some ranks lack: the ranks that have it), and `ValueError` on every rank if
    any rank's tree contains a value that cannot be compared.
    """
    leaves: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    _flatten(tree, "tree", leaves, kinds)
    digests, problem = dict[str, int](), ""
    limit = as_duration("andon.assert_same: timeout", timeout)
    with closing(Exchange(GroupGather(own_group(group, limit), WIDTH))) as exchange:
        try:
            for name, leaf in leaves.items():
                if isinstance(leaf, Tensor) and not leaf.is_meta:
                    digests[name] = tensor_digest(plain(leaf))
                else:
                    digests[name] = text_digest(type(leaf).__name__, value_digest(leaf, name))
        except ValueError as error:
            digests, problem = {}, str(error)
        places = text_digest(list(kinds.items()))
        values = {"problem": int(bool(problem)), "places": places, "leaves": text_digest(digests)}
        observations = exchange(0, "tree", values)
        foreign = [str(o.rank) for o in observations if o.values["problem"]]
        if foreign:
            other = f"the tree of rank {', '.join(foreign)} has a value that cannot be compared; its message names it"
            raise ValueError(f"andon.assert_same: {problem or other}")
        judgement = Judgement(_TREE, Seen(observations, None))
        law = judgement.first
        if law is None:
            return
        columns: Mapping[str, Sequence[int]]
        if law is _TREE[0]:
            columns, element = _first_place(kinds, exchange)
        else:
            columns = exchange.gather_named(0, "leaves", digests)
            odd = next(name for name, column in columns.items() if len(set(column)) > 1)
            element = _first_element(leaves[odd], exchange)
        judgement.seen = replace(judgement.seen, details={law.reads[0]: columns})
        tensors = 0 if law is _TREE[0] else len(leaves)
        raise with_message(judgement.violation(law), Scene(exchange.world_size, element=element, tensors=tensors))


def _flatten(tree: Any, name: str, leaves: dict[str, Any], kinds: dict[str, str]) -> None:
    if isinstance(tree, nn.Module | torch.optim.Optimizer):
        tree = tree.state_dict()
    if isinstance(tree, Mapping):
        kinds[name] = "mapping"
        for key, value in tree.items():
            _flatten(value, f"{name}[{key!r}]", leaves, kinds)
    elif isinstance(tree, list | tuple):
        kinds[name] = "sequence"
        for index, value in enumerate(tree):
            _flatten(value, f"{name}[{index}]", leaves, kinds)
    else:
        kinds[name] = "leaf"
        leaves[name] = tree


def _first_place(kinds: Mapping[str, str], exchange: Exchange) -> tuple[dict[str, list[int]], str]:
    """The first place that differs ("tree" if only the order does) with its digests by rank, and a text about it."""
    texts = exchange.gather_texts(0, json.dumps([*kinds.items()]))
    trees: list[dict[str, str]] = [dict(json.loads(text)) for text in texts]
    places = dict.fromkeys(place for tree in trees for place in tree)
    columns = {place: [tree.get(place, "nothing") for tree in trees] for place in places}
    odd = [place for place, column in columns.items() if len(set(column)) > 1]
    if odd:
        first, column = odd[0], columns[odd[0]]
        text = by_rank([f"a {kind}" if kind != "nothing" else kind for kind in column])
        text += f"; {len(odd) - 1} more places" if len(odd) > 1 else ""
    else:
        first, column = "tree", next(list(row) for row in zip(*trees, strict=True) if len(set(row)) > 1)
        text = f"the same leaves in another order: {by_rank(column)}"
    return {first: [text_digest(kind) for kind in column]}, text


def _first_element(leaf: Any, exchange: Exchange) -> str:
    is_tensor = isinstance(leaf, Tensor)
    texts = exchange.gather_texts(0, f"{leaf.dtype} {tuple(leaf.shape)}" if is_tensor else repr(leaf)[:_MOST])
    if len(set(texts)) == 1:
        return exchange.first_difference(0, leaf) if is_tensor else ""
    if max(map(len, texts)) <= _SHOWN:
        return by_rank(texts)
    # Show the part of long texts around the first character in which they differ.
    start = max(0, len(os.path.commonprefix(texts)) - _BEFORE)  # noqa: RUF071 - texts, not paths
    begin = "..." if start else ""
    shown = [f"{begin}{text[start : start + _SHOWN]}{'...' if len(text) > start + _SHOWN else ''}" for text in texts]
    return by_rank(shown)
