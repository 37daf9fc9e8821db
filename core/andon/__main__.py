"""`andon`, and `python -m andon`, also under torchrun."""

from __future__ import annotations

import os
import sys


def _look_elsewhere() -> None:
    """Let `python -m andon` find modules where `andon` does, and not first in the folder that it is called in.

    The libraries are imported from here on, and a `torch.py` that lies there is not to be run. Who wants a loop of
    that folder imported says so (`andon falsify`, `andon watch -m`).
    """
    first, ours = os.path.abspath(sys.path[0]), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not sys.flags.safe_path and first == os.getcwd() != ours:
        del sys.path[0]


def main() -> None:
    """Run the command line; an interrupt while it is being imported ends the process in one line, with 130."""
    try:
        from andon.cli.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("andon: interrupted\n")
        sys.stderr.flush()
        os._exit(130)
    run()


if __name__ == "__main__":
    if sys.argv[1:2] != ["watch"]:  # which runs a script as Python does
        _look_elsewhere()
    main()
