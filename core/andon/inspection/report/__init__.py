"""A run, or two side by side, as one HTML page."""
