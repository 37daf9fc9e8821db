"""The proof that the tests of V1 to V31 can fail: put to the seed's behaviour, each violation is caught."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from andon_contracts.violation import Violation
from tests.seed import test_v01_to_v10, test_v11_to_v21, test_v22_to_v31
from tests.seed.seed_behaviour import SEED, HoardingPipeline, OverlappingShards, Panicked, SelfMadeHidden
from tests.seed.subject import ANDON, Subject

CAUGHT = (AssertionError, pytest.fail.Exception, Violation, ValueError, Panicked)
"""What a test ends with that found something; errors in the test itself (TypeError and the like) are not among them."""

BEHAVES_WELL = {
    "test_v03_no_samples_change_nothing": "an empty batch is the one that the seed gets right",
    "test_v03_fewer_samples_than_replicas_update_all_of_them[4]": "n = G: see test_v01 and test_v08",
    "test_v19_replicas_are_copies_of_one_model": "the seed's process-global seed makes equal copies by accident",
    "test_v22_the_equivalence_can_fail": "a control of the test itself",
}
SPECIAL: dict[str, Subject] = {
    "test_v23_memory_is_measured_and_not_a_formula": replace(ANDON, pipeline=HoardingPipeline),
    "test_v25_hidden_states_are_finite_and_see_the_adapter": replace(ANDON, pipeline=SelfMadeHidden),
    "test_v27_what_replicas_train_on_partitions_the_batch": replace(SEED, coordinator=OverlappingShards),
}
"""Where the seed's own behaviour is another than that of its coordinator or pipeline."""


def cases() -> list[Any]:
    """The first set of parameters of every test of a violation that takes a subject."""
    found = []
    for module in (test_v01_to_v10, test_v11_to_v21, test_v22_to_v31):
        for name, test in vars(module).items():
            if name.startswith("test_v") and "subject" in inspect.signature(test).parameters:
                found += [] if name in BEHAVES_WELL else [pytest.param(test, first_parameters(test), id=name)]
    return found


def first_parameters(test: Callable[..., None]) -> dict[str, Any]:
    """The arguments of a test's first case."""
    given: dict[str, Any] = {}
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            first = values[0]
            given |= {names: first} if isinstance(names, str) else dict(zip(names, first, strict=True))
    return given


@pytest.mark.parametrize(("test", "given"), cases())
def test_the_seed_is_caught(test: Callable[..., None], given: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """Each test of V1 to V31 fails when its subject behaves as the seed does."""
    if "caplog" in inspect.signature(test).parameters:
        given = {**given, "caplog": request.getfixturevalue("caplog")}
    with pytest.raises(CAUGHT):
        test(SPECIAL.get(test.__name__, SEED), **given)


def test_every_violation_has_a_case() -> None:
    """V1 to V31 are all among the cases that the seed fails."""
    numbers = {int(case.id.split("_")[1].removeprefix("v")) for case in cases()}
    assert numbers == set(range(1, 32))
