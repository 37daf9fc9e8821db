"""A run's leavings, looked at afterwards: shown, drawn, compared with another, done again.

Nothing here changes a file of a run.
"""
