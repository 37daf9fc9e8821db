"""Reads what a run left: shows, compares, replays and reports it. The run's files stay unchanged."""
