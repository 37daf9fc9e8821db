"""`andon.watch`: the contracts of a step for anyone's training loop, and `andon.assert_same`."""

from __future__ import annotations

from andon_contracts.watch.opening import watch
from andon_contracts.watch.same import assert_same
from andon_contracts.watch.watcher import Watch

__all__ = ["Watch", "assert_same", "watch"]
