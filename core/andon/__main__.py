"""The entry point of `andon` and `python -m andon`, also under torchrun."""

from __future__ import annotations

import os
import sys


def _look_elsewhere() -> None:
    """Remove the current folder from the path of `python -m andon`, so that a `torch.py` in it is not imported.

    This is too late for an `andon.py` or a `contextlib.py` there: Python imports those before any of our code runs. In
    an untrusted folder only `andon` and `python -P -m andon` are safe. `andon falsify` and `andon watch -m` import a
    loop from the current folder on request.
    """
    if sys.flags.safe_path:
        return
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the folder was removed, so it has no modules
        return
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.abspath(sys.path[0]) == here != ours:
        del sys.path[0]


def main() -> None:
    """Run the command line. An interrupt during its import prints one line and ends the process with 130."""
    try:
        from andon.cli.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("andon: interrupted\n")
        sys.stderr.flush()
        os._exit(130)
    run()


if __name__ == "__main__":
    if sys.argv[1:2] != ["watch"]:  # `andon watch` runs a script with Python's own path
        _look_elsewhere()
    main()
