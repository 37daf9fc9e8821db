"""Other users of the machine, who reach whatever listens on the loopback, end no run and no watch, by no message."""

from __future__ import annotations

from pathlib import Path

import pytest

from falsify.nemesis.attacked import WORKERS, bits_of, train, watch
from falsify.nemesis.left_behind import Undisturbed

# By default tests/contracts/test_store.py, tests/launch/test_heartbeat_alone.py and tests/launch/test_joining.py show
# that values which no rank has signed are dropped and counted.
pytestmark = pytest.mark.deep


def test_a_run_ends_with_its_bits_whatever_is_said_where_it_listens(tmp_path: Path) -> None:
    """Four ranks of `andon train`, called from before they meet until they end. Only gloo listens, on the loopback."""
    alone, attacked = train(tmp_path / "alone", None), train(tmp_path / "attacked", 1)
    assert (alone.loss, attacked.loss) == ("", "")
    assert attacked.said.total() > 100
    whole = Undisturbed(tmp_path / "alone" / "run")
    assert Undisturbed(tmp_path / "attacked" / "run").result == whole.result


def test_a_watch_believes_nobody_who_is_no_rank(tmp_path: Path) -> None:
    """Four ranks under torchrun. Somebody writes, as ranks do, that they left, failed, know, or train unguarded, puts
    back old signs of life, and takes values away: the loop has its bits, each rank says how much it dropped, and what
    is wrong afterwards is seen, and halts all."""
    alone = watch(tmp_path / "alone", None)
    attacked = watch(tmp_path / "attacked", 1, bits_of(tmp_path / "alone"))
    assert (alone.loss, attacked.loss, attacked.halted) == ("", "", "")
    assert min(attacked.said[kind] for kind in ("left", "pulled", "beat", "unguarded", "deleted", "replayed")) >= 3
    for rank in range(WORKERS):
        assert f"andon: rank {rank} dropped " in (tmp_path / "attacked" / "said").read_text()
        assert "dropped" not in (tmp_path / "alone" / "said").read_text()
