"""`python -m falsify.nemesis.fuzz --cases N --seed S`: prints what was tried; 1 if anything went wrong."""

from __future__ import annotations

import argparse
import sys

from .run import fuzz
from .surfaces import SURFACES


def main() -> int:
    """Try the cases; the last line counts them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, help="over all surfaces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[surface.name for surface in SURFACES])
    parser.add_argument("--case", type=int, help="only the case of this number, of the surface that --only names")
    options = parser.parse_args()
    chosen = [surface for surface in SURFACES if options.only in (None, surface.name)]
    each = -(-options.cases // len(chosen))
    numbers = range(each) if options.case is None else [options.case]
    wrong = 0
    for surface in chosen:
        found = fuzz(surface, options.seed, numbers)
        wrong += len(found.wrong)
        print(f"{surface.name:12} {found.tried:6} cases, slowest {found.slowest_s:.2f} s")
        for number, what in found.wrong[:10]:
            print(f"    case {number}: {what}")
            again = f"--seed {options.seed} --only '{surface.name}' --case {number}"
            print(f"    again: python -m falsify.nemesis.fuzz {again}")
        sys.stdout.flush()
    print(f"{each * len(chosen) if options.case is None else 1} cases, {wrong} wrong, seed {options.seed}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
