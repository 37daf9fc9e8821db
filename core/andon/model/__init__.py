"""Models, adapters, their input, and the memory that they need."""
