"""Script mode: a training command as it is, run on several layouts of one global batch and judged by its ledgers.

    andon falsify --script "torchrun --nproc-per-node {world} -m andon watch train.py
        --batch {local_batch} --accumulate {accumulation}"

The ledgers are written by `andon.watch`, in the script or around it. No reference is needed: what is right gives the
same gradients on every layout.
"""

from __future__ import annotations

from andon_falsify.scripts.bench import ScriptBench
from andon_falsify.scripts.command import Command


def open_script(command: str, deadline_s: float) -> ScriptBench:
    """The bench of a command with placeholders, see `Command`. deadline_s: the budget's, for one run of a loop.

    Raises `InputError` for a command that cannot be laid out.
    """
    return ScriptBench(Command.read(command), deadline_s)
