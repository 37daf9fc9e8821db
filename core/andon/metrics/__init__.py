"""Scores from integer counts, hence the same on any number of workers."""
