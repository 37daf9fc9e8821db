"""Models, adapters, model inputs, and memory plans."""
