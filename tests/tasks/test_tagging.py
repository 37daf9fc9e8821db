"""A tag of each word: its loss over words, the gradient, and what is not scored."""

from __future__ import annotations

import pytest
import torch

from andon.console.problems import InputError
from andon.tasks.tagging import NO_TAG, TaggingTask
from tests.model.tiny import CPU, PAD
from tests.tasks.apart import Logits, farthest, ragged, tiny

ROWS = 40
NAMES = ("B-X", "I-X", "O")
TOKENS = ragged(ROWS)
TAGS = [
    [(0, 2, 2, 1, 2)[(row + place) % 5] if row * place % 3 == 0 else NO_TAG for place in range(len(TOKENS[row]))]
    for row in range(ROWS)
]
"""Every row has a word at its first token, and others further on. Most are of one tag: where gradients of words cancel,
what is left of them has fewer digits."""
TASK = TaggingTask(TOKENS, TAGS, names=NAMES, vocab_size=33, pad_id=PAD)
WORDS = [sum(tag != NO_TAG for tag in tags) for tags in TAGS]


def entropy(logits: Logits, row: int) -> torch.Tensor:
    found = [
        -logits(TOKENS[row][: place + 1]).log_softmax(0)[tag] for place, tag in enumerate(TAGS[row]) if tag != NO_TAG
    ]
    return torch.stack(found).sum()


def test_the_gradient_is_that_of_a_loop_in_float64() -> None:
    assert farthest(tiny("tokens", *NAMES), TASK, ROWS, entropy, WORDS) <= 2e-6


def test_terms_are_words_and_tags_are_digested() -> None:
    batch = TASK.load([3, 11], CPU)
    assert TASK.planned_terms([3, 11]) == [WORDS[3], WORDS[11]]
    assert int((batch["labels"] != NO_TAG).sum()) == WORDS[3] + WORDS[11]
    assert torch.equal(TASK.content(batch), TASK.planned_content([3, 11]))
    changed = {**batch, "labels": batch["labels"].clone()}
    changed["labels"][1, 0] = (changed["labels"][1, 0] + 1) % 3
    assert (TASK.content(changed) == TASK.planned_content([3, 11])).tolist() == [True, False]


@pytest.mark.parametrize(
    ("tags", "fault"),
    [([0], "1 tags for 2 tokens"), ([0, 3], "tag 3 is not one of the 3 tags 0 to 2"), ([NO_TAG] * 2, "no word of it")],
)
def test_a_row_that_cannot_be_learned_is_refused_with_its_place(tags: list[int], fault: str) -> None:
    with pytest.raises(InputError, match=f"row 1: {fault}"):
        TaggingTask([[1], [1, 2]], [[0], tags], names=NAMES, vocab_size=33, pad_id=PAD)


def test_words_that_were_cut_off_are_missed() -> None:
    task = TaggingTask([[1, 2]], [[0, 2]], names=NAMES, vocab_size=33, pad_id=PAD, unread={0: {2: 0}}, cut=[0])
    found = task.score([0], torch.tensor([[0.0, 0.1, 2.0, 0.3]], dtype=torch.float64))
    assert (found.words, found.accuracy, found.recall, found.precision) == (3, 2 / 3, 0.5, 1.0)
    assert found.loss == pytest.approx(0.2)
    assert task.cut_rows([0]) == 1
