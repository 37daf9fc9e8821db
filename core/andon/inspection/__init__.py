"""A run's leavings, looked at afterwards: shown, compared with another, done again. Nothing here writes to a run."""
