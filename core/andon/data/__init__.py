"""Rows of text in: files, labels, splits, tokens and the embedded generator. Imports no torch."""
