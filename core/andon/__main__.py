"""`andon`, and `python -m andon`, also under torchrun."""

from __future__ import annotations

import os
import sys


def _look_elsewhere() -> None:
    """Take the current folder off the path of `python -m andon`, so that a `torch.py` in it is not imported.

    This is too late for an `andon.py` or a `contextlib.py` there: Python imports those before any of our code runs.
    Only `andon` and `python -P -m andon` are safe in somebody else's folder. A user who wants a loop imported from the
    current folder asks for it (`andon falsify`, `andon watch -m`).
    """
    if sys.flags.safe_path:
        return
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the folder was removed: there is nothing in it
        return
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.abspath(sys.path[0]) == here != ours:
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
