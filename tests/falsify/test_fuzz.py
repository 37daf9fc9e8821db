"""The fuzzer: what is read from files holds, and a reader that does not is noticed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from falsify.nemesis.fuzz.mutations import MUTATIONS, Mutation
from falsify.nemesis.fuzz.run import fuzz
from falsify.nemesis.fuzz.samples import ledger_lines
from falsify.nemesis.fuzz.surfaces import SURFACES, Surface

SEED = 7


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.deep)])
@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
def test_damaged_input_ends_in_the_promised_error_or_is_right(surface: Surface, count: int) -> None:
    """No input ends in a traceback, hangs, or is accepted as something else than was written."""
    found = fuzz(surface, SEED, range(count))
    assert found.tried == count
    assert found.wrong == []


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_each_mutation_changes_what_it_is_given(mutation: Mutation) -> None:
    """Of a hundred draws on a ledger, at least nine in ten change it: damage that does nothing would test nothing."""
    data = b"".join(ledger_lines(random.Random(0)))
    changed = sum(mutation(random.Random(number), data) != data for number in range(100))
    assert changed >= 90


def test_an_error_of_another_kind_is_reported_with_its_case() -> None:
    """A reader that ends in a traceback for one case of three is reported for exactly that case."""

    def attempt(draw: random.Random, folder: Path) -> str:
        del draw
        seen.append(folder)
        if len(seen) == 2:
            raise KeyError("label")
        return ""

    seen: list[Path] = []
    assert fuzz(Surface("broken", attempt), SEED, [5, 8, 9]).wrong == [(8, "KeyError: 'label'")]
