"""The most bytes of tensors that live at once while a function runs."""

from __future__ import annotations

from collections.abc import Callable

from andon.model.memory import StorageWatch


def peak_bytes(work: Callable[[], object]) -> int:
    """A tensor made before and not touched by `work` is not counted."""
    watch = StorageWatch()
    with watch:
        work()
    return watch.peak
