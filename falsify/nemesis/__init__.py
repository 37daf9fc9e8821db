"""Faults brought about in real runs of the trainer, proved, undone, and judged: `python -m falsify.nemesis`.

Issue 5, item 6. `language` says what a nemesis is; `bench` plays it, `registry` has all of them.

No part of the wheel: this is imported from the checkout, as `tests` and `benchmarks` are. Imports inside are relative,
since a type checker that looks into `falsify` for `andon_falsify` knows this package as `nemesis`.
"""
