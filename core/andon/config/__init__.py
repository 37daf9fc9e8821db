"""A run's settings: their schema, how they are loaded, and which of them define a run. Imports no torch."""
