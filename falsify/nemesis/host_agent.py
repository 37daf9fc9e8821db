"""torchrun on one host, and the end of its rank: `python -m falsify.nemesis.host_agent RUN LOG KEEP -- ...`.

torchrun ends with 1 whatever its rank ends with, and after a partition minutes later. What is promised is the end of
the rank. So this starts torchrun with what it says in LOG, ends it once its rank has failed, and ends with the code in
the rank's own report. What the rank says is what this says. KEEP 1: torchrun is left to itself, and its code is passed
on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from .processes import alive, children, command_line

_POLL_S = 0.01
_UNSAID = 1


def main() -> int:
    """Until torchrun has ended, or its rank has failed; the exit code of the rank."""
    folder, log, keep = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1"
    with log.open("ab") as file:
        agent = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *sys.argv[5:]], stderr=file)
    if keep:
        return agent.wait()
    pid, rank = 0, ""
    while agent.poll() is None and not pid:
        pid, rank = _rank_of(agent.pid)
        time.sleep(_POLL_S)
    while agent.poll() is None:
        if not alive(pid) and (code := _reported(folder, rank)) != 0:
            agent.kill()
            agent.wait()
            return code
        time.sleep(_POLL_S)
    return agent.returncode and _reported(folder, rank)


def _rank_of(agent: int) -> tuple[int, str]:
    """The process of the agent's rank, and the rank; (0, "") while there is none."""
    for pid in children(agent):
        if b"train" in command_line(pid):
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found = [each.removeprefix(b"RANK=") for each in variables if each.startswith(b"RANK=")]
            if found:
                return pid, found[0].decode()
    return 0, ""


def _reported(folder: Path, rank: str) -> int:
    """The exit code in the report of this rank; 1 where it left none."""
    try:
        return int(json.loads((folder / "reports" / f"rank-{rank}.json").read_text())["exit"])
    except (OSError, ValueError):
        return _UNSAID


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
