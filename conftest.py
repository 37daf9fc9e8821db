"""Lets `pytest` run from a checkout in which Andon is not installed.

Where the distribution is installed, as under tox, nothing happens, so that what is tested is what was built.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_SOURCES = [str(Path(__file__).parent / folder) for folder in ("contracts", "core", "falsify")]

if importlib.util.find_spec("andon_contracts") is None:
    sys.path[:0] = _SOURCES
    os.environ["PYTHONPATH"] = os.pathsep.join([*_SOURCES, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
