"""Exit codes of the `andon` command.

0 is success. 2 is what the user got wrong (input, configuration, an unwritable or full disk). The others say what
happened to the run; they follow sysexits where that has a fitting number.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """How a process of ours ended."""

    OK = 0
    CRASHED = 1  # an error of ours that no contract foresaw
    USAGE = 2  # bad input: arguments, configuration, data, run folder, disk
    VIOLATION = 70  # a contract was broken; nothing of that step was kept
    RANK_LOST = 71  # a rank died (signal, out of memory) or could not be reached
    RANK_SILENT = 72  # a rank gave no answer within the deadline
    PREEMPTED = 75  # ended by a signal at a step boundary, with a checkpoint; resume to go on
    INTERRUPTED = 130  # ended by SIGINT before training, or in a command that has no step boundary
