"""One training step with the same bits on any number of workers. Knows no text, no transformers, no files."""
