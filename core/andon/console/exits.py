"""Exit codes of the `andon` command.

0 is success. 2 is what the user got wrong (input, configuration, an unwritable or full disk). The others say what
happened to the run; they follow sysexits where that has a fitting number.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """How a process of ours ended."""

    OK = 0
    CRASHED = 1
    """An error of ours that no contract foresaw."""
    USAGE = 2
    """Bad input: arguments, configuration, data, run folder, disk."""
    VIOLATION = 70
    """A contract was broken; nothing of that step was kept."""
    RANK_LOST = 71
    """A rank died (signal, out of memory) or could not be reached."""
    RANK_SILENT = 72
    """A rank gave no answer within the deadline."""
    PREEMPTED = 75
    """Ended by a signal at a step boundary, with a checkpoint; resume to go on."""
    INTERRUPTED = 130
    """Ended by SIGINT where there is no step boundary to end at: before training, or in another command."""
