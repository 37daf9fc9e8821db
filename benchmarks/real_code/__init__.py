"""Well-known training scripts that nobody here wrote, as they are, under a watch: `python -m benchmarks.real_code`."""
