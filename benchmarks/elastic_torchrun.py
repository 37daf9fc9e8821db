"""A run under torchrun's own elasticity that goes 2 -> 1 -> 2 workers: `python -m benchmarks.elastic_torchrun`.

Two agents of `torchrun --nnodes 1:2` on loopback; the one that does not hold the rendezvous is killed by SIGKILL, then
a new one is started. Final weights and loss are compared with those of `andon train`, to the bit, and `andon verify`
judges both ledgers.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.elastic import result_of, verified, worlds
from benchmarks.runs import environment, run, steps_of
from falsify.nemesis.processes import family, wait_until_gone

_PATIENCE_S = 300.0


def main() -> int:
    """Print the sizes and whether the bits are the same; 0 if they are, and every claim of the ledgers holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=["training.checkpoint_every=7", "training.max_steps=70"])
    options = parser.parse_args()
    settings = [part for item in options.set for part in ("--set", item)]
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        whole, folder = run(base / "whole", *settings), base / "elastic"
        port = _free_port()
        agents = [_agent(folder, port, settings, base / f"agent-{number}", hosts=number == 0) for number in (0, 1)]
        try:
            _wait_for_steps(folder, agents[0], world=2, steps=10)
            members = family(agents[1].pid)
            agents[1].kill()
            wait_until_gone(members[1:])
            _wait_for_steps(folder, agents[0], world=1, steps=5)
            agents.append(_agent(folder, port, settings, base / "agent-2", hosts=False))
            codes = [agent.wait(_PATIENCE_S) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
        same = result_of(folder) == result_of(whole.folder)
        good = verified(whole.folder, folder)
        sizes = worlds(folder)
        print(f"workers by generation: {sizes}; torchrun's exits {codes}; bits {'same' if same else 'OTHER'}")
    return 0 if same and good and sizes == [2, 1, 2] and codes == [0, -9, 0] else 1


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _agent(folder: Path, port: int, settings: list[str], log: Path, *, hosts: bool) -> subprocess.Popen[bytes]:
    """One agent of one worker; `hosts`: it holds the rendezvous. It waits 3 s for others, not 30."""
    launcher = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "elastic"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    meeting += ["--rdzv-conf", f"is_host={int(hosts)},last_call_timeout=3"]
    train = ["-m", "andon", "train", "--run-dir", str(folder), "--resume", "auto", *settings]
    # Without this variable torch 2.13 never tells an agent that joins later where rank 0's store is.
    environ = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        command = [sys.executable, "-m", "torch.distributed.run", *launcher, *meeting, *train]
        return subprocess.Popen(command, env=environ, stdout=file, stderr=file, start_new_session=True)


def _wait_for_steps(folder: Path, agent: subprocess.Popen[bytes], *, world: int, steps: int) -> None:
    """Until the newest generation has `world` workers and has done so many steps since."""
    deadline, before = time.monotonic() + _PATIENCE_S, -1
    while time.monotonic() < deadline and agent.poll() is None:
        if before < 0 and os.path.exists(folder / "ledger.jsonl") and worlds(folder)[-1:] == [world]:
            before = steps_of(folder)
        if 0 <= before <= steps_of(folder) - steps:
            return
        time.sleep(0.02)
    raise RuntimeError(f"no {steps} steps on {world} workers; the agent ended with {agent.poll()}")


if __name__ == "__main__":
    raise SystemExit(main())
