"""Rank processes: how they start, how they end, and how the cause of an end is reported."""
