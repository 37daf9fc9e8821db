"""Ranks as processes: how they start, how they end, and who is told why."""
