"""What a user sets: the schema, how it is read, and what of it defines a run. Imports no torch."""
