"""The command line with which Andon starts Python processes."""

from __future__ import annotations

import subprocess
import sys


def module_command(name: str, *arguments: str) -> list[str]:
    """The command that runs the module `name` with this interpreter and its flags (-O, -W, -X ...).

    With -P, Python does not look for modules in the current folder: it may be somebody else's run folder. Not with -I,
    which would also ignore PYTHONPATH, where Andon itself may be found.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-P", "-m", name, *arguments]
