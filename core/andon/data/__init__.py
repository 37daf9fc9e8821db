"""Data files, labels, splits, tokenizers and the embedded data sets. Imports no torch."""
