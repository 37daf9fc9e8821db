"""Defects of data-parallel training in known projects, shown on their own code: docs/findings.md."""
