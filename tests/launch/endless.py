"""A module whose import says so and does not end, as on a disk that gives nothing."""

from __future__ import annotations

import threading

print("importing", flush=True)
threading.Event().wait()
