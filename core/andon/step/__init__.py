"""One training step, bit-identical on any number of workers. Independent of text, transformers and files."""
