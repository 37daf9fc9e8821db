"""The files of a run, written whole or not at all. Knows no model."""
