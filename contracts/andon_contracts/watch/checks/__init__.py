"""What a watch checks, one module per concern: see `Check`."""
