"""The compliance tests: what a data-parallel trainer must keep, tried on each of its backends.

`pytest --pyargs andon_falsify` runs them; the last line says how many claims were checked of how many.
"""

from __future__ import annotations
