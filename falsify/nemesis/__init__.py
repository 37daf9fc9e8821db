"""Faults caused in real runs of the trainer, proved, healed, and judged: `python -m falsify.nemesis`.

It is not part of the wheel. Imports inside are relative, since a type checker finds this package as `nemesis` too.
"""
