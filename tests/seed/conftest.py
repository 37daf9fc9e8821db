"""The subject that tests of this folder judge; `test_seed_fails` and `test_mutants` pass others by hand."""

from __future__ import annotations

import pytest

from tests.seed.subject import ANDON, Subject


@pytest.fixture
def subject() -> Subject:
    """Andon as it is."""
    return ANDON
