"""Real ranks: processes that a fork server starts once, kept alive and given one case after the other."""
