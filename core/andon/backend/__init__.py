"""Backends: all ranks in this process one after another, or one rank of a process group."""
