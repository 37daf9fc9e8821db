"""The power suite: known faults, planted one at a time to measure whether the claims see them.

A fault that changes nothing is an error of the suite. A fault that no claim sees is a gap in the claims. `registry` has
the faults of our trainer, `looped` the faults of loops. `falsify/test_power.py` and `benchmarks.freeze` plant them and
judge the installed `andon_falsify`.

The package is imported from the checkout, as `tests` and `benchmarks` are, and is not in the wheel. Its own imports are
relative, since a type checker that searches `falsify` for `andon_falsify` knows this package as `power`.
"""

from __future__ import annotations
