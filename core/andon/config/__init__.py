"""The settings of a run: their schema, how they are read, and which of them define it. Imports no torch."""
