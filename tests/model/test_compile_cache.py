"""What torch keeps of a compilation is found by the next run, and not by one of other code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# By default: what torch keeps of a compilation is named by our code (test_compiled, no kernel is chosen by timing).
pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, as torch does to compile for a CPU"),
    pytest.mark.timeout(600),
]
_ROOT = Path(__file__).parents[2]
_RUN = """
import json, sys
import torch
from torch._dynamo.utils import counters
from andon.model import compiled
from andon.model.build import backbone_of
from tests.model.tiny import adapted
if sys.argv[1:]:
    compiled._code_of_rewrites = lambda: sys.argv[1]
torch.set_num_threads(1)
model = adapted()
backbone_of(model).forward = compiled.traced(model, compiled.rewriting_backend({}))
loss = model(input_ids=torch.ones((2, 8), dtype=torch.int64)).logits.sum()
loss.backward()
bits = [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]
print(json.dumps({"counted": dict(counters["aot_autograd"]), "loss": loss.item(), "bits": bits}))
"""


def _compiled(folder: Path, seed: str, *more: str) -> dict[str, Any]:
    given = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _RUN, *more]
    ended = subprocess.run(command, env=given, cwd=_ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_a_second_run_finds_what_the_first_compiled(tmp_path: Path) -> None:
    first, second, third = _compiled(tmp_path, "1"), _compiled(tmp_path, "2"), _compiled(tmp_path, "3", "other code")
    counted = [
        {name: each["counted"].get(f"autograd_cache_{name}", 0) for name in ("hit", "miss", "bypass")}
        for each in (first, second, third)
    ]
    assert counted == [
        {"hit": 0, "miss": 1, "bypass": 0},
        {"hit": 1, "miss": 0, "bypass": 0},
        {"hit": 0, "miss": 1, "bypass": 0},
    ]
    assert first["bits"] == second["bits"] == third["bits"]
    assert first["loss"] == second["loss"]
