"""Callbacks that run `andon.watch` in other trainers, and trackers of metrics. Each module needs its library."""
