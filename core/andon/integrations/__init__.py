"""Libraries of others: `andon.watch` as the callbacks of those that own the training loop, and where metrics go.

Each module needs its library.
"""
