"""The recorded durations keep the default run short."""

from __future__ import annotations

import json

from tests.durations import EXEMPT, RECORD, exempt, slow


def test_a_default_test_takes_two_seconds_or_is_exempt() -> None:
    """By the record, not by a clock: `python -m tests.durations` writes it on a quiet machine."""
    found = set(slow(json.loads(RECORD.read_text(encoding="utf-8"))))
    assert found - exempt() == set(), f"make it faster, mark it deep, or list it in {EXEMPT.name} with a reason"
    assert exempt() - found == set(), f"fast or gone: remove it from {EXEMPT.name}"
