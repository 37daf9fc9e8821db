"""One rank of one peer: `torchrun ... -m benchmarks.causal_peers.rank PEER FOLDER LAYOUT...`, one layout after another.

Where a library fails its error is noted, and what comes after it in this process is not tried: ranks may be anywhere.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.causal_peers.job import Layout, Seen, model, watched
from benchmarks.causal_peers.registry import PEERS, PLANTED


def main() -> int:
    """Train every layout, and leave FOLDER/NUMBER-RANK.pt for each."""
    name, folder, *layouts = sys.argv[1:]
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    loop = {**PEERS, **PLANTED}[name].load()
    if world > 1:
        dist.init_process_group("gloo")
    for number, text in enumerate(layouts):
        own = model()
        seen = Seen()
        try:
            with watched(own) as seen:
                loop(own, Layout(**json.loads(text)))
        except Exception as error:  # noqa: BLE001  whatever a library raises is its verdict
            seen.error = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        torch.save(seen.as_dict(), Path(folder) / f"{number}-{rank}.pt")
        if seen.error:
            return 1
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
