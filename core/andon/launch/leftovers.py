"""Folders for sockets that killed launchers left behind.

multiprocessing makes a folder for its sockets (`/tmp/pymp-...`) and removes it when the process ends, which one that is
killed by SIGKILL cannot do. Each launcher writes into its folder who it is, and the next one removes the folders of
those that are gone.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

from andon_contracts.liveness.process import Process
from andon_contracts.untrusted import read_json

OWNER = "andon-launcher.json"
"""The file in such a folder that says whose it is."""


def claim_and_sweep() -> None:
    """Say whose this process's folder for sockets is, and remove those of launchers of this machine that are gone."""
    with suppress(OSError):  # a disk that is full or slow keeps nobody from training
        (Path(util.get_temp_dir()) / OWNER).write_text(json.dumps(Process.here().to_json()), encoding="utf-8")
        for file in Path(tempfile.gettempdir()).glob(f"pymp-*/{OWNER}"):
            if _is_left(file):
                shutil.rmtree(file.parent, ignore_errors=True)


def _is_left(file: Path) -> bool:
    try:
        folder = file.parent
        ours = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
        return ours and Process.from_json(read_json(file)).local_state() == "gone"
    except (OSError, ValueError):
        return False
