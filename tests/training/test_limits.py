"""What would not fit into the files of a run is refused by `andon check` and before training, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from andon.config.load import load_config
from andon.console.problems import InputError
from andon.metrics.confusion import Confusion
from andon.metrics.scores import scores
from andon.run.atomic import json_bytes
from andon.training import limits
from andon.training.preview import describe
from andon_contracts.fields import Real
from andon_contracts.record import GENESIS, RankPart, Step, StepDigests, encode
from tests.training.runs import Runs

H = "0123456789abcdef"


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("confusion.MOST_BYTES", r"data\.eval: the confusion matrix of \d+ rows of 3 classes may take \d+ bytes"),
        ("MOST_JSON", r"data\.train: 3 labels of \d+ bytes in all may make summary\.json \d+ bytes"),
        ("MOST_SETTINGS", r"data\.train: 3 labels of \d+ bytes in all may make adapter/config\.json \d+ bytes"),
        ("MAX_LINE", r"training\.batch_size: the ledger's line of a step of 8 rows on 2 workers may take \d+ bytes"),
    ],
)
def test_what_would_not_fit_is_said_before_the_run(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, limit: str, said: str
) -> None:
    """`andon check` names the key, the size and the limit; it would end the run at its first line, or its last."""
    config = load_config(None, runs.overrides(), {"run.backend": "inline"})
    assert any("rows to train on" in line for line in describe(config))
    monkeypatch.setattr(f"andon.training.limits.{limit}", 10)
    with pytest.raises(InputError, match=said):
        list(describe(config))


def test_no_class_takes_more_of_a_summary_than_is_reserved() -> None:
    wrong, right = (((k, (k + 1) % 99, 10**9 + k) for k in range(99)), ((k, k, 12_345_678 + k) for k in range(99)))
    found = scores(Confusion(99, tuple(sorted([*wrong, *right])))).as_dict()
    text = json_bytes({"eval": {"classes": found["classes"]}})
    assert len(text) < 99 * limits._CLASS


def test_no_rank_takes_more_of_a_line_than_is_reserved() -> None:
    part = RankPart(rank=1 << 14, leaves=(), ids=(), weights=H, gradient=H, optimizer=H, content=H)
    real = Real.of(0.1)
    step: Any = Step(1, 0, 0, (), 0, real, real, real, 0, 1, "inline", StepDigests(H, H, H, H), ())
    one = len(encode(step, 0, GENESIS))
    assert len(encode(replace(step, ranks=(part,) * 100), 0, GENESIS)) - one < 100 * limits._RANK
    ids = tuple(range(900, 1000))
    own = replace(part, ids=ids)
    more = len(encode(replace(step, ids=ids, ranks=(own,)), 0, GENESIS)) - one
    assert more < 2 * len(ids) * len("999,") + limits._RANK
