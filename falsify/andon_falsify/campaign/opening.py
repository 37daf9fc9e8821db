"""The bench of what a request names."""

from __future__ import annotations

import sys
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

from andon.console.messages import InputError, Problem
from andon_falsify.campaign.interpreter import Bench
from andon_falsify.campaign.request import OURS, Request
from andon_falsify.campaign.script_bench import open_script
from andon_falsify.peers.registry import PEERS, installed
from andon_falsify.ranks.pool import RankPools


def open_bench(request: Request, pools: RankPools) -> Bench:
    """The subject of `request` on its bench, by the name that reports give it; its ranks are those of `pools`.

    Raises `InputError` for a subject in a package that is not there, before anything is run.

    Nothing of a foreign subject is imported here: that is the business of its ranks, which may die of it.
    """
    bench = _bench(request, pools)
    bench.subject = request.name or bench.subject
    return bench


def _bench(request: Request, pools: RankPools) -> Bench:
    if request.script is not None:
        return open_script(request.script, request.budget.deadline_s)
    if request.subject == OURS:
        from andon_falsify.campaign.trainer_bench import AndonBench
        from andon_falsify.ranks.trainer import AndonTrainer

        return AndonBench(AndonTrainer(pools))
    from andon_falsify.campaign.loop_bench import LoopBench
    from andon_falsify.loops.subject import LoopSubject

    _look_in_the_current_folder()
    name, peer = request.subject, PEERS.get(request.subject)
    if peer is None:
        _require_package(name)
    version = peer.version if peer is not None else _version(name)
    return LoopBench(LoopSubject(peer.make if peer is not None else name, name, pools), name, version)


def _look_in_the_current_folder() -> None:
    """As `python -m` does: `mytrainer:make` names a file that lies there. Ranks take over where modules are found."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def _require_package(make: str) -> None:
    """Looked for and not imported. A module within a package is found by its ranks, since packages may make theirs."""
    package = make.partition(":")[0].partition(".")[0]
    if package not in sys.modules and find_spec(package) is None:
        msg = f"there is no module {package!r}, in the current folder or installed, so that nothing can be tried"
        raise InputError([Problem("--subject", msg)])


def _version(make: str) -> str:
    names = packages_distributions().get(make.partition(":")[0].partition(".")[0], [])
    return installed(names[0]) if names else ""
