"""The attempt to prove a data-parallel trainer wrong: subjects, faults, checkers, a reference, and the tests that ship.

`checkers`, `history`, `verdict` and `reference` import neither the trainer nor its contracts.
"""

from __future__ import annotations
