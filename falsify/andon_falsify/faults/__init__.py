"""Known wrongs, planted one at a time to measure whether the suite sees them: mutants of the seed, of memory, of ours.

A fault that changes nothing is an error of the suite; one that no claim notices is a hole in it.
"""

from __future__ import annotations
