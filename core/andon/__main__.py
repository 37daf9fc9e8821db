"""`python -m andon`, also under torchrun."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    try:
        from andon.cli.app import main
    except KeyboardInterrupt:
        sys.stderr.write("andon: interrupted\n")
        sys.stderr.flush()
        os._exit(130)
    main()
