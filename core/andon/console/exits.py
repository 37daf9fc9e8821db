"""Exit codes of the `andon` command.

0 is success, 2 a mistake of the user (input, configuration, an unwritable or full disk). The others classify how a run
failed or ended early, with the number of sysexits if one fits.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit code of Andon's processes."""

    OK = 0
    CRASHED = 1  # an unexpected exception; of `andon doctor`: training cannot run here
    USAGE = 2  # bad input: arguments, configuration, data, run folder, disk
    VIOLATION = 70  # a contract was broken; the step was discarded
    RANK_LOST = 71  # a rank died (signal, out of memory) or could not be reached
    RANK_SILENT = 72  # a rank missed its deadline
    PREEMPTED = 75  # a signal ended it: at a step boundary, with a checkpoint to resume from, or before training
    INTERRUPTED = 130  # SIGINT ended it before training, or in a command without step boundaries
