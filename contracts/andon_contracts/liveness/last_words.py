"""What a process still has to say or do at its end, where nobody may take it: it may last so long, and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable


def within(seconds: float, words: Callable[[], None]) -> bool:
    """Whether this was done in time: a disk, a reader or a group that takes nothing holds nobody up."""
    speaking = threading.Thread(target=words, name="andon-end", daemon=True)
    try:
        speaking.start()
    except RuntimeError:  # no more threads on this machine: better held up than unsaid
        words()
        return True
    speaking.join(seconds)
    return not speaking.is_alive()
