"""Trainers behind one small protocol: a case goes in, a trace of what was seen from outside comes out."""

from __future__ import annotations
