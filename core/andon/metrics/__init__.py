"""Scores from integer counts and exactly rounded sums: identical for any number of ranks."""
