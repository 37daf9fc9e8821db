"""Imported by a fork server that is to end while it imports, or never to: `ANDON_TEST_DIES` says how."""

from __future__ import annotations

import os
import signal
import threading

HOW = os.environ["ANDON_TEST_DIES"]
if HOW == "never":
    print("importing", flush=True)
    threading.Event().wait()
if HOW == "SIGKILL":
    os.kill(os.getpid(), signal.SIGKILL)
raise ValueError(f"{HOW}\nand more")
