"""`andon.watch` as callbacks of other trainers, and where metrics go. Each module needs its library."""
