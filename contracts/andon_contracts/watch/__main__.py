"""`python -m andon_contracts.watch SCRIPT ARGS`, also under torchrun: `andon watch` with torch and icontract alone."""

from __future__ import annotations

import sys

from andon_contracts.watch.script import main

if __name__ == "__main__":
    sys.exit(main())
