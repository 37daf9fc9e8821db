"""A finished run on a GPU says what it says on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from andon.model.causal import generate
from andon.run.folder import RunFolder
from andon.training.export import export_run
from andon.training.inference import load_run, predict
from tests.model.test_causal import PROMPTS, moved
from tests.model.tiny import causal
from tests.training.runs import Runs, row, write_jsonl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_predictions_and_a_checked_merge(tmp_path: Path) -> None:
    assert Runs(write_jsonl(tmp_path / "train.jsonl")).train(tmp_path / "run", "optimizer.lr=0.05") == 0
    texts = [row(number)[0] * (1 + number % 3) for number in range(20)]
    probabilities = []
    for device in ("cpu", "auto"):
        run = load_run(RunFolder(tmp_path / "run"), device=device)
        assert run.device.type == {"cpu": "cpu", "auto": "cuda"}[device]
        probabilities.append([one.probabilities for one in predict(run, texts)])  # type: ignore[union-attr]
    torch.testing.assert_close(*map(torch.tensor, probabilities), atol=1e-5, rtol=0.0)
    assert export_run(run, tmp_path / "out", "float32", "full")[0].endswith("0 rows get another label")


def test_greedy_text() -> None:
    model = moved(causal("llama"))
    wanted = generate(model, PROMPTS, (), [8] * len(PROMPTS))
    assert generate(model.to("cuda"), PROMPTS, (), [8] * len(PROMPTS)) == wanted
