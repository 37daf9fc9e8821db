"""A launcher as a process of its own, which a test can signal and kill: `python -m tests.launch.driver JSON`."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

PRELOAD = ("torch", "torch.distributed", "andon.launch.rank", "tests.launch.entries")
WITHOUT_TORCH = ("andon.launch.rank", "tests.launch.entries", "andon.launch.server_last")


def main() -> None:
    """Launch two ranks of each entry in turn, print each result, end with the last code (stopped: no fork server)."""
    from andon.launch import fork_server, launcher
    from andon.launch.launcher import launch, warm_up

    requested = json.loads(sys.argv[1])
    folder = Path(requested["folder"])
    if "stopped" in requested:
        launcher.STOPPED_S = 0.3
    warm_up(tuple(requested["modules"]))
    if requested.get("stopped"):
        server = fork_server.running()
        assert server is not None
        server.send(signal.SIGSTOP)
    for name, payload in requested["entries"]:
        entry = f"tests.launch.entries:{name}"
        result = launch(entry, payload, workers=2, run_folder=folder, timeout_s=60)
        found = {"exit": result.exit.name, "cause": result.cause, "exits": dict(result.exits)}
        print("result " + json.dumps(found), flush=True)
    sys.exit(result.exit)


if __name__ == "__main__":
    main()
