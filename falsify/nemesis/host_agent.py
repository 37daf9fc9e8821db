"""torchrun on one host, until its rank has ended: `python -m falsify.nemesis.host_agent RUN LOG KEEP -- ...`.

The promise concerns the end of the rank, but torchrun ends with 1 for any exit code of a rank, and minutes after a
partition. So this starts torchrun with its output in LOG, kills it once the rank has failed, and exits with the code in
the rank's report. KEEP 1: torchrun is left alone, and its exit code is passed on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from .processes import alive, command_line

_POLL_S = 0.01


def main() -> int:
    folder, log, keep = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1"
    with log.open("ab") as file:
        agent = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *sys.argv[5:]], stderr=file)
    rank, number = None, ""
    while agent.poll() is None and not keep:
        if rank is None:
            with suppress(psutil.Error):
                for child in psutil.Process(agent.pid).children():
                    if "train" in command_line(child) and "RANK" in (variables := child.environ()):
                        rank, number = child, variables["RANK"]
        elif not alive(rank) and (code := _reported(folder, number)) != 0:
            agent.kill()
            agent.wait()
            return code
        time.sleep(_POLL_S)
    return agent.wait() if keep else agent.returncode and _reported(folder, number)


def _reported(folder: Path, rank: str) -> int:
    """The exit code in the report of this rank; 1 without a report."""
    try:
        return int(json.loads((folder / "reports" / f"rank-{rank}.json").read_text())["exit"])
    except (OSError, ValueError):
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
