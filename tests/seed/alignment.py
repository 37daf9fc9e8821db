"""Whether pipelines that somebody else built may train together."""

from __future__ import annotations

from collections.abc import Sequence

from andon.backend.inprocess import InlineBackend
from andon.pipeline import ClassifyPipeline, SampleEncoder
from andon.step.step import TrainingStep


def attest_alike(pipelines: Sequence[ClassifyPipeline]) -> None:
    """Raise `Violation` where layout, weights or base of the pipelines differ, as a coordinator does at its start."""
    first = pipelines[0]
    rows = SampleEncoder(first.model_config, first.config).of_ids([[0]], [0])
    backend = InlineBackend([pipeline.device for pipeline in pipelines])
    TrainingStep(backend, [pipeline.replica for pipeline in pipelines], rows, 4, None).attest_start({})
