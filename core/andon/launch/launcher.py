"""Starts ranks on this machine and turns how they ended into one `Exit`.

    warm_up()                                # as early as possible: imports run beside what the command does
    result = launch("andon.training.entry:train_rank", payload, workers=4, run_folder=folder, timeout_s=30)

Ranks are forked from a forkserver that has imported the heavy packages once and computed nothing: forking a process
that ran torch code hangs, and spawning pays the imports once per rank. The launcher itself imports no torch.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from andon.launch.context import LAUNCHER, RUN_ID, STORE
from andon.launch.fork_server import claim_and_sweep, end_if_stopped, require_sockets
from andon.launch.preemption import PREEMPTION_SIGNALS
from andon.launch.rank import Job, serve
from andon.launch.report import clear
from andon.launch.store_server import StoreServer
from andon.launch.supervisor import LaunchResult, Supervisor, signal_pipe

PRELOAD = ("torch", "torch.distributed", "transformers", "peft", "andon.launch.rank")
"""Default imports of the forkserver."""
_SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 in every rank: ranks share the cores, and a forkserver must have no thread when it forks."""
_NOT_INHERITED = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
"""Variables by which another launcher may have told this process that it is a rank."""
_one_at_a_time = threading.Lock()
_preload: list[str] = []


def warm_up(preload: Sequence[str] = PRELOAD) -> None:
    """Start the forkserver, which imports `preload` while this process goes on; returns at once.

    Only the first call in a process decides what is imported; a later call starts the forkserver again if it has ended.
    `PREEMPTION_SIGNALS` are blocked in the forkserver for good, and in a rank until it has its handlers. So a signal to
    the whole process group ends ranks at a step boundary instead of killing them through their parent. Nor does it kill
    multiprocessing's tracker of semaphores, which would be started again and print a traceback for each semaphore that
    it does not know. Raises `InputError` if the folder for temporary files takes no socket.
    """
    require_sockets()
    if not _preload:
        claim_and_sweep()
        _preload.extend(preload)
    multiprocessing.set_forkserver_preload(_preload)  # for a forkserver that was ended meanwhile, and is started again
    # A server looks for modules in the folder that it is started in first: a `torch.py` there is not to be run.
    given = dict.fromkeys(_SINGLE_THREADED, "1") | {"PYTHONSAFEPATH": "1", LAUNCHER: str(os.getpid())}
    before = {name: os.environ.get(name) for name in given}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION_SIGNALS)
    try:
        os.environ.update(given)
        resource_tracker.ensure_running()  # it ignores SIGTERM and SIGINT, and unblocks them here; of others it dies
        signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def launch(
    entry: str,
    payload: Mapping[str, Any],
    *,
    workers: int,
    run_folder: Path,
    timeout_s: float,
    silence_s: float = math.inf,
) -> LaunchResult:
    """Run `entry` ("module:function", called with the payload, returns an `Exit`) in `workers` rank processes.

    Returns when all ranks have ended. Once one has failed, the others get SIGTERM, and SIGKILL within 2 s.
    `PREEMPTION_SIGNALS` to this process are forwarded to the ranks once (from the main thread); they have `timeout_s`
    seconds to end at a step boundary; a second SIGINT ends them at once. A rank that is stopped for more than
    `silence_s` is given up, unless another rank has given it up before. One launch at a time in a process.

    Raises TypeError for a payload that is not JSON, RuntimeError while another launch runs in this process.
    """
    arguments = json.dumps(payload)
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("another launch runs in this process")
    try:
        with signal_pipe() as signals:
            warm_up()
            clear(run_folder)
            with closing(StoreServer()) as store:
                run_id = uuid.uuid4().hex
                job = Job(entry, arguments, str(run_folder), _environment(workers, run_id, store.address))
                context = multiprocessing.get_context("forkserver")
                ranks = [context.Process(target=serve, args=(job, rank)) for rank in range(workers)]
                return Supervisor(ranks, signals, run_folder, timeout_s, silence_s, launch=run_id).run()
    finally:
        end_if_stopped()
        _one_at_a_time.release()


def _environment(workers: int, run_id: str, store: str) -> dict[str, str]:
    # The forkserver's own variables are as old as the forkserver.
    own = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}
    # One machine: gloo would otherwise look up the host's name, and listen where others can reach it.
    defaults = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    world = {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers), "OMP_NUM_THREADS": "1"}
    return defaults | own | world | {RUN_ID: run_id, STORE: store, LAUNCHER: str(os.getpid())}
