"""Figures of the README, each by one command: `python -m benchmarks.NAME`."""
