"""A command whose memory grows with what a user names runs in a child process, so that its death is reported."""

from __future__ import annotations

import os
import signal
import sys

import typer

from andon.console.exits import Exit
from andon.console.messages import say
from andon.launch.orphan import bind_to_parent
from andon_contracts.liveness.process import exit_text


def in_a_child(command: str) -> None:
    """Fork: the child returns and runs the command; the parent waits and ends as the child does (`typer.Exit`).

    A child that a signal killed is reported with the signal, and with what the kernel says of its memory; the exit
    code is 71 then. Ctrl-C and the parent's death end the child. A process that runs torch, which must not fork, runs
    the command itself.
    """
    if "torch" in sys.modules:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        bind_to_parent(parent)
        return
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except KeyboardInterrupt:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    if code < 0:
        say(f"{command} {exit_text(code)}")
    raise typer.Exit(code if code >= 0 else int(Exit.RANK_LOST))
