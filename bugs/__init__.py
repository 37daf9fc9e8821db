"""Forty reported defects of data-parallel training, each rebuilt small, and a scorecard of the tools that see them.

`python -m bugs` runs all of them. See `bugs.bench` for what a case is.
"""
