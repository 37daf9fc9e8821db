"""`andon.watch` as the callbacks of libraries that own the training loop. Each module needs its library."""
