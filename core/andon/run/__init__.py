"""The files of a run, written atomically. Independent of any model."""
