"""What tests of this folder share."""

from __future__ import annotations

from multiprocessing import forkserver
from pathlib import Path

import pytest

from andon_falsify.ranks.pool import RankPool


@pytest.fixture
def adopting_server() -> None:
    """The fork server of this process adopts what ranks leave behind.

    A process has one fork server, and its first user decides what that loads: where another test was first, ranks'
    orphans belong to init and cannot be told from anybody else's.
    """
    RankPool(1)  # names what the server is to load
    forkserver.ensure_running()
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    if "andon_falsify.ranks.adoption" not in Path(f"/proc/{pid}/cmdline").read_text():
        pytest.skip(
            "needs a fork server of its own: run this file by itself (another test started it for this process)"
        )
