"""Runs on one data set, with and without a tracker."""

from __future__ import annotations

from tests.support.folders import runs, whole

__all__ = ["runs", "whole"]
