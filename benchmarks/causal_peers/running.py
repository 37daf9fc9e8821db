"""Start the ranks of a peer, and read what they saw."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.causal_peers.job import Layout, Seen

LIMIT_S = 240
_ROOT = Path(__file__).resolve().parents[2]


def run(peer: str, layouts: Sequence[Layout]) -> dict[Layout, list[Seen]]:
    """What each rank saw of `peer` on each of `layouts`, all of one world size: real processes, started by torchrun
    where they are more than one. A layout that was not reached has one `Seen` with the reason.
    """
    (world,) = {layout.world for layout in layouts}
    start = [] if world == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    texts = [json.dumps(asdict(layout)) for layout in layouts]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path[1:]])}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *start, "-m", "benchmarks.causal_peers.rank", peer, folder, *texts]
        with subprocess.Popen(
            command, cwd=_ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                _, said = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                _, said = process.communicate()
        return {
            layout: [_read(Path(folder) / f"{number}-{rank}.pt", said) for rank in range(world)]
            for number, layout in enumerate(layouts)
        }


def _read(path: Path, said: str) -> Seen:
    if path.is_file():
        return Seen(**torch.load(path))
    lines = [line for line in said.splitlines() if line.strip()]
    return Seen(error=f"was not reached: {lines[-1] if lines else 'nothing was said'}")
