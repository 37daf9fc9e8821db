"""A launch whose fork server is stopped or dies before a rank starts: `python -m tests.launch.stopped_server JSON`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

PRELOAD = ("andon.launch.worker_agents", "tests.launch.entries", "andon.launch.server_last")


def main() -> None:
    """Launch two ranks for each `how` of the JSON argument; print each result; end with the last exit code."""
    from andon.launch import fork_server
    from andon.launch.elastic import launch_elastic
    from andon.launch.launcher import launch, warm_up
    from andon.launch.sizes import Bounds, Sizing

    requested = json.loads(sys.argv[1])
    folder, entry = Path(requested["folder"]), "tests.launch.entries:end"
    fork_server.STOPPED_S = 0.3
    warm_up(("andon.launch.server_first", "tests.launch.dying") if "ANDON_TEST_DIES" in os.environ else PRELOAD)
    server = fork_server.running()
    if requested["stopped"]:
        assert server is not None
        server.send(signal.SIGSTOP)
    for how in requested["how"]:
        payload = {"how": how}
        if requested["elastic"]:
            sizing = Sizing(Bounds(1, 2))
            result = launch_elastic(entry, lambda *_, sent=payload: sent, sizing, run_folder=folder, timeout_s=60)
        else:
            result = launch(entry, payload, workers=2, run_folder=folder, timeout_s=60)
        print(json.dumps({"exit": result.exit.name, "cause": result.cause}), flush=True)
    sys.exit(result.exit)


if __name__ == "__main__":
    main()
