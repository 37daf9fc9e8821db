"""The digest of any nest of values says all that is in it, and nothing that is chance."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import andon
from andon_contracts.watch.values import Nest, kept_digest, state_digest, value_digest
from tests.watch.small import answers, net, sgd, watched

LONG = 2000


class Mode(enum.Enum):
    LEFT = 1
    RIGHT = 2


@dataclasses.dataclass
class Row:
    ids: list[int]
    name: str = ""


def _tensor(at: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    found = torch.zeros(LONG, dtype=dtype)
    if at is not None:
        found[at] = 1
    return found


def _array(at: int | None = None) -> np.ndarray[Any, Any]:
    return _tensor(at).numpy().copy()


# Pairs that differ in one thing, of which a `repr` says nothing or too little.
DIFFERENT: dict[str, tuple[object, object]] = {
    "one element of a long tensor in a mapping": ({"a": _tensor()}, {"a": _tensor(1000)}),
    "which element": ([_tensor(998)], [_tensor(1000)]),
    "one element of a long array": ({"a": _array()}, {"a": _array(1000)}),
    "digits": ({"lr": torch.tensor(0.12345601)}, {"lr": torch.tensor(0.12345602)}),
    "the sign of zero": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "a dtype": (_tensor(), _tensor(dtype=torch.float64)),
    "a shape": (_tensor(), _tensor().view(2, -1)),
    "halves": (_tensor(3, torch.bfloat16), _tensor(4, torch.bfloat16)),
    "an array of objects": (np.array([1, None]), np.array([2, None])),
    "a number of numpy": (np.float32(0.1), np.float32(0.2)),
    "a key": ({"a": 1}, {"b": 1}),
    "a nest": ([[1], [2]], [[1, 2]]),
    "a type": (1, True),
    "a text and a number": ("1", 1),
    "an item of a set": ({1, 2}, {1, 3}),
    "a field": (Row([1]), Row([2])),
    "a member": (Mode.LEFT, Mode.RIGHT),
    "a path": (Path("a"), Path("b")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_has_another_digest(name: str) -> None:
    one, other = DIFFERENT[name]
    assert value_digest(one, "") != value_digest(other, "")


SQUARE = torch.arange(9.0).view(3, 3)
ALIKE: dict[str, tuple[object, object]] = {
    "the order of a set": ({0, 8}, {8, 0}),
    "of a mapping": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "strides": (SQUARE.t(), SQUARE.t().contiguous()),
    "a kind of sequence": ((1, [2]), [1, (2,)]),
    "where an object lies": (Row([1], "x"), Row([1], "x")),
    "where those of an array lie": (np.array([None, 1000000]), np.array([None, int("1000000")])),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_chance_has_no_part_in_it(name: str) -> None:
    one, other = ALIKE[name]
    assert name != "the order of a set" or list(one) != list(other)
    assert value_digest(one, "") == value_digest(other, "")


FOREIGN: dict[str, tuple[Callable[[], object], str]] = {
    "deep in a nest": (lambda: {"a": [1, {"b": object()}]}, r"it\['a'\]\[1\]\['b'\] is a builtins.object, "),
    "a function": (lambda: [lambda: 0], r"it\[0\] is a builtins.function, "),
    "in a set": (lambda: {1, object()}, "it's items is a builtins.object, "),
    "in a field": (lambda: Row([1], object()), r"it\.name is a builtins.object, "),
    "without content": (lambda: torch.zeros(2, device="meta"), "it is a torch.Tensor, "),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_cannot_be_compared_is_refused_with_its_place(name: str) -> None:
    """An object whose `repr` is its address would differ on every rank: who gives one is told where it is."""
    made, words = FOREIGN[name]
    with pytest.raises(ValueError, match=words):
        value_digest(made(), "it")


def _told() -> list[str]:
    last = dist.get_rank() == 1
    model = net()
    with andon.watch(model, sgd(model)) as w:
        return [
            _said(lambda: andon.assert_same({"a": {1: object() if last else 0}})),
            _said(lambda: andon.assert_same({"a": _array(7 + last)})),
            _said(lambda: w.batch([4], [{"x": object()}])),
            _said(lambda: w.rng("numpy", "agree", {"x": object()})),
        ]


def _said(use: Callable[[], object]) -> str:
    try:
        use()
    except (ValueError, andon.Violation) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_what_a_loop_tells_is_compared_whole_or_refused() -> None:
    """In trees, contents and random states; a tree that one rank cannot compare is refused on all ranks."""
    foreign = (
        "andon.assert_same: the tree of rank 1 holds what cannot be compared",
        "andon.assert_same: tree['a'][1] is a builtins.object",
    )
    for tree, said in zip(foreign, answers(2, _told), strict=True):
        assert said[0].startswith(f"ValueError: {tree}")
        assert said[1].startswith("Violation: trees-agree broken")
        assert said[2].startswith("ValueError: content[0]['x'] is a builtins.object")
        assert said[3].startswith("ValueError: the state of 'numpy'['x'] is a builtins.object")


# what an optimizer keeps


class Odd(torch.optim.SGD):
    """Keeps for each parameter an object of its own, an array, and how often it came."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] |= {"seen": {1, 8}, "array": _array(3), "what": object(), "count": 1}


def _grouped() -> list[tuple[str, int]]:
    """What is found where a group holds objects of each rank's own, and a list in it changes on rank 1 at update 2."""
    model, at = net(), [0]
    own = {"decide": lambda: 0, "mask": _tensor(5), "kinds": {"a", "b"}, "at": at}
    optimizer = Odd([{"params": list(model.parameters()), **own}], lr=0.1)
    w = watched(model, optimizer, 2, lambda step: at.append(1) if (step, dist.get_rank()) == (2, 1) else None)
    return [(found.clause, found.step) for found in w.findings]


def test_groups_and_states_are_compared_by_what_is_in_them() -> None:
    """Not by where an object lies, and a list that is changed in place is another one."""
    assert answers(2, _grouped) == [[("hyperparameters-agree", 2)]] * 2


def test_what_has_no_content_stands_by_its_type_and_hides_nothing_else() -> None:
    assert kept_digest([lambda: 0, _array()]) == kept_digest([lambda: 1, _array()])
    assert kept_digest([lambda: 0, _array()]) != kept_digest([lambda: 0, _array(1000)])
    assert kept_digest([print]) != kept_digest([object()])
    assert state_digest({"a": object(), "b": _array()}) == state_digest({"a": object(), "b": _array()})
    assert state_digest({"b": _array()}) != state_digest({"b": _array(1000)})


def test_a_nest_is_read_again_where_it_can_change() -> None:
    """What is deeper than what was made for the call may be the same object with other content."""
    nest, inner = Nest(), [1]
    first = nest.digest([[{"a": inner}]])
    assert nest.digest([[{"a": inner}]]) == first
    inner[0] = 2
    assert nest.digest([[{"a": inner}]]) != first
    assert nest.digest([[{"a": (1, 2)}]]) == nest.digest([[{"a": (1, 2)}]]) != nest.digest([[{"a": (1, 3)}]])
