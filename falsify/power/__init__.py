"""The power suite: known faults, planted one at a time to measure whether the claims see them.

A fault that changes nothing is an error of the suite; one that no claim sees is a hole in the claims. `registry` has
the faults of our trainer, `looped` those of other loops, `causal` those of instruction tuning. `falsify/test_power.py`
and `benchmarks.freeze` plant them and judge the installed `andon_falsify`.

No part of the wheel: this is imported from the checkout, as `tests` and `benchmarks` are. Imports inside are relative,
since a type checker that looks into `falsify` for `andon_falsify` knows this package as `power`.
"""

from __future__ import annotations
