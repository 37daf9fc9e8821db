"""`python -m andon`, also under torchrun."""

from __future__ import annotations

from andon.cli.app import main

if __name__ == "__main__":
    main()
