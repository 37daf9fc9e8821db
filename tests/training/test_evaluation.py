"""Evaluation: every row once and finite, or a violation that says so; the same scores on any number of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from andon.backend.base import InlineBackend
from andon.config.load import load_config
from andon.console.messages import Exit
from andon.model import masks as batches
from andon.model.masks import EvaluationBatching
from andon.tasks import text as text_tasks
from andon.tasks.text import ClassificationTask
from andon.training.forecast import evaluation_batching
from andon.training.material import prepare
from andon.training.preview import describe
from andon.training.trainer import Evaluator, evaluate
from andon_contracts.policy import evaluations, reset_evaluations
from andon_contracts.violation import Violation
from tests.training.runs import Runs, outcome, records, write_jsonl

ROWS = 150  # three batches of at most 64 rows, so that two ranks have different numbers of rows
CPU = torch.device("cpu")


class ByFirstToken(nn.Module):
    """Predicts class 1 for an odd first token, surely; `odd` is the logit it gives to class 1 of token `at`."""

    def __init__(self, at: int = -1, odd: float = 0.0) -> None:
        super().__init__()
        self._at, self._odd = at, odd

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        first = input_ids[:, 0]
        logits = nn.functional.one_hot(first % 2, 2).float()
        logits[first == self._at, 1] = self._odd
        return SimpleNamespace(logits=logits)


class RepeatingBackend(InlineBackend):
    def gather(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [local[0] for _ in local]


class SwappingBackend(InlineBackend):
    def gather(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(local)[::-1]


def rows() -> ClassificationTask:
    """Row r is the token r and as many others as its number has over a multiple of 7; of class 1 if r is odd, but for
    row 5. So rows are not computed in their order."""
    labels = [row % 2 for row in range(ROWS)]
    labels[5] = 0
    return ClassificationTask(
        [[row] + [0] * (row % 7) for row in range(ROWS)],
        labels,
        num_labels=2,
        vocab_size=ROWS,
        pad_id=ROWS,
        max_length=8,
    )


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_row_is_scored_once(world: int) -> None:
    """One of 150 rows is wrong, a 0 taken for a 1, on any number of ranks, also where one has no batch."""
    found = evaluate(InlineBackend([CPU] * world), [ByFirstToken()] * world, rows(), range(ROWS))
    assert found.confusion is not None
    assert found.confusion.table() == [[75, 1], [0, 74]]
    assert found == evaluate(InlineBackend([CPU]), [ByFirstToken()], rows(), range(ROWS))


NOT_FINITE = "finite broken .* logits is not finite for 1 of 150 rows, first for row 133"
TWICE = r"evaluation-once .* rows \[6, 13, 20, 27, 34, 41, 48, 55\] were counted more than once"


@pytest.mark.parametrize(
    ("backend", "odd", "said"),
    [
        *((InlineBackend, odd, NOT_FINITE) for odd in (math.nan, math.inf, -math.inf)),
        (RepeatingBackend, 0.0, TWICE),
        (SwappingBackend, 0.0, "evaluation-once .* rows, but not the planned rows in the planned order"),
    ],
)
def test_rows_that_do_not_come_back_once_and_finite_are_not_scored(
    backend: type[InlineBackend], odd: float, said: str
) -> None:
    with pytest.raises(Violation, match=said):
        evaluate(backend([CPU] * 2), [ByFirstToken(133 if odd else -1, odd)] * 2, rows(), range(ROWS))


def test_a_score_of_fewer_rows_than_planned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = text_tasks.scores
    monkeypatch.setattr(text_tasks, "scores", lambda *given: replace(inner(*given), rows=ROWS - 1))
    with pytest.raises(Violation, match=r"evaluation-once .* rank 0 reports rows as 149.0, but the rows give 150.0"):
        evaluate(InlineBackend([CPU]), [ByFirstToken()], rows(), range(ROWS))


def test_each_evaluation_is_held_to_the_rows_that_a_watch_is_held_to() -> None:
    reset_evaluations()
    evaluate(InlineBackend([CPU]), [ByFirstToken()], rows(), range(ROWS))
    assert evaluations() == {"evaluation-once": 2, "finite": 1}


SCORED = ("data.validation_fraction=0.4", "training.evaluate_every=2", "training.epochs=1")


def test_every_validation_loss_is_the_same_on_any_number_of_workers_and_across_a_resume(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of the two rows of a micro-batch, or of more shorter ones, so that each rank has several of them."""
    monkeypatch.setattr(batches, "_MOST_TOKENS", 0)

    def scored(folder: Path) -> list[object]:
        return [(each.step, each.rows, each.scores, each.confusion) for each in records(folder, "eval")]

    folders = [tmp_path / str(workers) for workers in (1, 2, 3, 4)]
    for workers, folder in enumerate(folders, start=1):
        assert runs.train(folder, *SCORED, workers=workers) == Exit.OK
    stopped = runs.stopped(tmp_path / "stopped", 2, *SCORED)
    assert runs.train(stopped, *SCORED, workers=2, resume="auto") == Exit.OK
    first = scored(folders[0])
    assert ([each[0] for each in first], first[2]) == ([2, 4, 2], first[0])  # 2 is the best; its scores are told twice
    assert all(scored(each) == first for each in (*folders[1:], stopped))
    assert all(outcome(each) == outcome(folders[0]) for each in (*folders[1:], stopped))


def test_evaluation_batches_have_the_tokens_of_a_micro_batch(tmp_path: Path) -> None:
    """2 rows of 4,095 tokens, padded to 4,096, in a micro-batch, whatever the workers; packs have max_length tokens."""
    rows = tmp_path / "rows.jsonl"
    texts = ["a" * 4095, *(f"{'b ' * (n % 5)}{n}" for n in range(40))]
    rows.write_text("".join(json.dumps({"text": text, "label": str(len(text) % 2)}) + "\n" for text in texts))
    settings = ["model.max_length=5000", f"data.train={rows}", "training.batch_size=8", "training.micro_batches=4"]
    config = load_config(None, [*settings, "seed=1"])
    material = prepare(config)
    assert 0 in material.plan.ids
    assert evaluation_batching(material, config) == EvaluationBatching(2 * 4096, 8, 5000)


def test_rows_are_scored_once_after_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last scores are those of the last validation, or of the best one whose weights were restored."""
    task, other, updates = rows(), rows(), SimpleNamespace(model=ByFirstToken(), updates=0)
    evaluator = Evaluator(InlineBackend([CPU]), [updates], EvaluationBatching())  # type: ignore[list-item]
    reset_evaluations()

    def passes(step: int, of: ClassificationTask, ids: range) -> int:
        before, updates.updates = evaluations().get("finite", 0), step
        evaluator(of, ids)
        return evaluations().get("finite", 0) - before

    first, all_ = range(4), range(ROWS)
    # The first four rows are right, so their loss is the lowest: those of step 2 stay known.
    assert [passes(2, task, first), passes(2, task, first)] == [1, 0]
    assert [passes(3, task, all_), passes(4, task, all_)] == [1, 1]
    assert [passes(2, task, first), passes(4, task, all_), passes(3, task, all_)] == [0, 0, 1]
    assert [passes(3, other, all_), passes(3, task, first)] == [1, 1]


def test_a_sample_of_the_rows_is_scored_and_said(runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same rows each time, in both data sets; a number of rows or more is all of them."""
    held = write_jsonl(tmp_path / "held.jsonl", 20)
    more = ("data.validation_fraction=0.4", f"data.eval={held}", "training.eval_rows=7", "training.max_steps=1")
    config = load_config(None, runs.overrides(*more))
    material = prepare(config)
    assert len({*material.validation_ids}) == len({*material.evaluation_ids}) == 7
    assert {*material.validation_ids} < {*material.rows.validation_ids}
    other = prepare(load_config(None, runs.overrides(*more, "seed=43", "training.eval_rows=18")))
    assert (len(other.validation_ids), len(other.evaluation_ids)) == (18, 18)
    assert other.rows.validation_ids == other.validation_ids
    note = "note: scores are of 7 of 18 validation rows and 7 of 20 evaluation rows (training.eval_rows)"
    assert note in list(describe(config))
    assert runs.train(tmp_path / "run", *more, workers=2) == Exit.OK
    assert note in capfd.readouterr().err
    assert [each.rows for each in records(tmp_path / "run", "eval")] == [7, 7]
