"""`andon`, and `python -m andon`, also under torchrun."""

from __future__ import annotations

import os
import sys


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
    main()
