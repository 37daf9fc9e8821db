"""Tasks: encoded rows as batches, the sum of their losses, and their scores."""
