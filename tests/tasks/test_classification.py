"""Classification: the loss is a sum in closed form, and a digest of the batch binds what the model receives."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from andon.console.messages import InputError
from andon.model.masks import EvaluationBatching, logits_of, predictions
from andon.tasks.text import ClassificationTask, MultiLabelTask
from tests.model.tiny import CPU, PAD, adapted, padded_batch, perturbed, task


class Fixed(nn.Module):
    """Gives row r the logits `table[first token]`, so that a loss can be worked out by hand."""

    def __init__(self, table: list[list[float]]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor(table))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Fixed:
        self.logits = self.table[input_ids[:, 0]]
        return self


def test_a_reader_is_told_the_name_of_a_class() -> None:
    named = ClassificationTask([[3], [4]], [1, 0], num_labels=2, vocab_size=9, pad_id=0, names=["no", "yes"])
    assert [named.learned(row) for row in (0, 1)] == ["class 1 (yes)", "class 0 (no)"]
    assert task([[3]], [1]).learned(0) == "class 1"
    several = MultiLabelTask([[3]], [[0, 2]], num_labels=3, vocab_size=9, pad_id=0, names=["a", "b", "c"])
    assert several.learned(0) == "labels [0, 2] (a, c)"


def test_the_loss_is_the_weighted_sum() -> None:
    """Logits ln(1), ln(2), ln(5) have probabilities 1/8, 2/8, 5/8: the sum is 1*ln(8) + 2*ln(4) + 3*ln(8/5).

    torch's weighted mean would divide by 6, the mean by 3 (seed S5, D3).
    """
    rows = task([[0], [0], [0]], [0, 1, 2], class_weights=[1.0, 2.0, 3.0])
    loss = rows.loss_sum(Fixed([[math.log(1), math.log(2), math.log(5)]]), rows.load([0, 1, 2], CPU))
    assert loss.loss_sum.dtype == torch.float32
    assert loss.loss_sum.dim() == 0
    assert loss.loss_sum.item() == pytest.approx(math.log(8) + 2 * math.log(4) + 3 * math.log(8 / 5), rel=1e-6)
    assert loss.correct.item() == 1
    assert loss.correct.dtype == torch.int64


def test_the_loss_is_taken_in_fp32_whatever_the_logits() -> None:
    """Equal logits cost ln(3) = 1.0986; with the eight bits of bfloat16 it would be 1.1016."""
    rows = task([[0]], [0])
    losses = rows.row_losses(torch.zeros(1, 3, dtype=torch.bfloat16), torch.tensor([0]))
    assert losses.dtype == torch.float32
    assert losses.item() == pytest.approx(math.log(3), rel=1e-6)


def test_the_models_own_loss_stays_out_of_it() -> None:
    """It would guess its kind from the labels' dtype and write that into the config."""
    model = adapted()
    rows = task([[1, 2], [3]], [0, 2])
    rows.loss_sum(model, rows.load([0, 1], CPU))
    assert model.get_submodule("base_model.model").config.problem_type is None  # type: ignore[union-attr]


def test_padding_is_on_the_right_to_the_longest_row_in_eights() -> None:
    rows = task([[1, 2, 3], list(range(9))], [0, 1])
    batch = rows.load([1, 0], CPU)
    assert batch["input_ids"].tolist() == [[*range(9), *[PAD] * 7], [1, 2, 3, *[PAD] * 13]]
    assert batch["attention_mask"].tolist() == [[1] * 9 + [0] * 7, [1] * 3 + [0] * 13]
    assert batch["labels"].tolist() == [1, 0]
    assert rows.load([0], CPU)["input_ids"].shape == (1, 8)


def test_padding_does_not_exceed_the_positions() -> None:
    """Ten positions and nine tokens: ten columns, not sixteen, or a BERT would look beyond its table."""
    rows = ClassificationTask([list(range(9))], [0], num_labels=3, vocab_size=33, pad_id=PAD, max_length=10)
    assert rows.load([0], CPU)["input_ids"].shape == (1, 10)


@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
def test_what_stands_behind_a_row_does_not_matter(architecture: str) -> None:
    model = perturbed(adapted(architecture))
    rows = task([[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12]], [2, 0])
    together = predictions(model, rows.load([0, 1], CPU))
    alone = predictions(model, rows.load([0], CPU))
    torch.testing.assert_close(together[:1], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=1e-3)


@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(0, PAD - 1), min_size=1, max_size=12), st.integers(0, 2)), min_size=1, max_size=6
    ),
    data=st.data(),
)
def test_content_is_the_planned_digest_in_any_batch(rows: list[tuple[list[int], int]], data: st.DataObject) -> None:
    given_rows = task([row for row, _ in rows], [label for _, label in rows])
    ids = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    batch = given_rows.load(ids, CPU)
    assert torch.equal(given_rows.content(batch), given_rows.planned_content(ids))


def _put(key: str, *place: int, value: int) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda batch: batch[key].__setitem__(place, value)


def _flip(batch: dict[str, torch.Tensor]) -> None:
    batch |= {name: tensor.flip(1) if tensor.dim() == 2 else tensor for name, tensor in batch.items()}


def _roll(batch: dict[str, torch.Tensor]) -> None:
    batch["attention_mask"] = batch["attention_mask"].roll(1, dims=1)


@pytest.mark.parametrize(
    ("tamper", "changed"),
    [
        (_put("input_ids", 0, 1, value=9), [True, False]),
        (_put("input_ids", 0, 2, value=9), [True, False]),
        (_put("labels", 0, value=2), [True, False]),
        (_put("attention_mask", 0, 3, value=1), [True, False]),
        (_put("attention_mask", 0, 0, value=0), [True, False]),
        (_flip, [True, True]),
        (_roll, [True, True]),
    ],
    ids=["a token", "the last token", "a label", "mask too long", "mask with a hole", "left padding", "mask moved"],
)
def test_content_sees_every_kind_of_tampering(
    tamper: Callable[[dict[str, torch.Tensor]], None], changed: list[bool]
) -> None:
    rows = task([[1, 2, 3], [4, 5]], [0, 1])
    batch = {name: tensor.clone() for name, tensor in rows.load([0, 1], CPU).items()}
    tamper(batch)
    assert (rows.content(batch) != rows.planned_content([0, 1])).tolist() == changed


def test_the_table_spans_its_chunks() -> None:
    rows = task([[index % PAD] * (1 + index % 5) for index in range(1100)], [index % 3 for index in range(1100)])
    ids = [0, 511, 512, 1023, 1024, 1099]
    assert torch.equal(rows.content(rows.load(ids, CPU)), rows.planned_content(ids))


def test_all_wrong_rows_are_told_with_their_places() -> None:
    with pytest.raises(InputError) as caught:
        ClassificationTask(
            [[1], [33], [-1], [], [1, PAD], [1], [1]],
            [3, 0, 0, 0, 0, "unsafe", True],  # type: ignore[list-item]
            num_labels=3,
            vocab_size=33,
            pad_id=PAD,
            places=[f"train.csv:{line}" for line in range(2, 9)],
        )
    text = str(caught.value).splitlines()
    assert [line.partition(": ")[0] for line in text] == [f"train.csv:{line}" for line in range(2, 9)]
    for line, part in zip(
        text, ["label 3", "id 33", "id -1", "no tokens", "padding token", "'unsafe'", "True"], strict=True
    ):
        assert part in line


def test_too_long_rows_and_other_numbers_of_labels_are_refused() -> None:
    with pytest.raises(InputError, match="3 tokens are more than max_length 2"):
        ClassificationTask([[1, 2, 3]], [0], num_labels=3, vocab_size=33, pad_id=PAD, max_length=2)
    with pytest.raises(InputError, match="2 rows of tokens but 1 labels"):
        task([[1], [2]], [0])


def test_rows_that_do_not_exist_are_refused() -> None:
    """A negative id would silently be a row counted from the end."""
    rows = task([[1], [2]], [0, 1])
    with pytest.raises(ValueError, match="at least one row"):
        rows.load([], CPU)
    for ids in ([2], [-1]):
        with pytest.raises(IndexError):
            rows.load(ids, CPU)


@given(lengths=st.lists(st.integers(1, 5000), max_size=200), tokens=st.integers(0, 20_000))
def test_evaluation_visits_every_row_once_longest_first(lengths: list[int], tokens: int) -> None:
    """In batches with room for no row more: of 64 rows, or of the tokens of a micro-batch, 4,096 being allowed."""
    batching = EvaluationBatching(tokens, multiple=16, limit=4500)
    batches = batching.of(lengths)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    shapes = [(len(batch), batching.padded(max(lengths[row] for row in batch))) for batch in batches]
    most = max(4096, tokens)
    assert all(rows == 1 or (rows <= 64 and rows * length <= most) for rows, length in shapes)
    assert all(rows == 64 or (rows + 1) * length > most for rows, length in shapes[:-1])
    for before, batch in pairwise(batches):
        assert min(lengths[row] for row in before) >= max(lengths[row] for row in batch)
    if lengths:
        largest = batching.largest(lengths)
        assert largest in shapes
        assert all(rows * length <= largest[0] * largest[1] for rows, length in shapes)


def test_a_model_in_bfloat16_computes_in_it_and_its_head_does_not() -> None:
    model = adapted("decoder", "bfloat16")
    seen: dict[str, torch.dtype] = {}

    def note(name: str) -> Callable[..., None]:
        def noted(_: nn.Module, given: object, output: torch.Tensor) -> None:
            seen[name] = output.dtype

        return noted

    for name, module in model.named_modules():
        if name.endswith(("q_proj.lora_A.default", "score.modules_to_save.default")):
            module.register_forward_hook(note(name))
    assert logits_of(model, padded_batch()).dtype == torch.float32
    assert {kind for name, kind in seen.items() if "score" in name} == {torch.float32}
    assert {kind for name, kind in seen.items() if "lora_A" in name} == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu")
