"""Andon: data-parallel training in which every step is a checked fact.

The public API is importable from here. It is loaded on first use, so that `import andon` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from andon.console.messages import InputError as InputError
    from andon.coordinator import DataParallelCoordinator as DataParallelCoordinator
    from andon.gradients import average_gradients as average_gradients
    from andon.gradients import has_non_finite as has_non_finite
    from andon.gradients import shard_samples as shard_samples
    from andon.pipeline import BatchResult as BatchResult
    from andon.pipeline import ClassifyConfig as ClassifyConfig
    from andon.pipeline import ClassifyPipeline as ClassifyPipeline
    from andon.pipeline import SafetySample as SafetySample
    from andon.pipeline import TransformerConfig as TransformerConfig
    from andon.step.reduce import TreeReduction as TreeReduction
    from andon.training.api import Preempted as Preempted
    from andon.training.api import RankLost as RankLost
    from andon.training.api import RunError as RunError
    from andon.training.api import TrainingRun as TrainingRun
    from andon.training.api import open_run as open_run
    from andon.training.api import train as train
    from andon_contracts.clauses import CLAUSES as CLAUSES
    from andon_contracts.violation import Halted as Halted
    from andon_contracts.violation import Violation as Violation
    from andon_contracts.watch import assert_same as assert_same
    from andon_contracts.watch import watch as watch

_NAMES = {
    "andon.console.messages": "InputError",
    "andon.coordinator": "DataParallelCoordinator",
    "andon.gradients": "average_gradients has_non_finite shard_samples",
    "andon.pipeline": "BatchResult ClassifyConfig ClassifyPipeline SafetySample TransformerConfig",
    "andon.step.reduce": "TreeReduction",
    "andon.training.api": "Preempted RankLost RunError TrainingRun open_run train",
    "andon_contracts.clauses": "CLAUSES",
    "andon_contracts.violation": "Halted Violation",
    "andon_contracts.watch": "assert_same watch",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'andon' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
