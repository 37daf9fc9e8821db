"""One worker of a classifier's training: its configuration, its samples, and gradient and step as halves apart."""

from __future__ import annotations

from andon.pipeline.classify import ClassifyPipeline
from andon.pipeline.config import ClassifyConfig, TransformerConfig
from andon.pipeline.samples import BatchResult, SafetySample

__all__ = ["BatchResult", "ClassifyConfig", "ClassifyPipeline", "SafetySample", "TransformerConfig"]
