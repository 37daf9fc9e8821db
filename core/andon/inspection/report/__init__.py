"""HTML report on a run, or on two side by side."""
