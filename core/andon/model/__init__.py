"""Models, adapters, and how a model is given its rows."""
