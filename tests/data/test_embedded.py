"""The embedded data sets: functions of the seed, disjoint, ragged, with labels that follow from the text."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon.data import rewriting
from andon.data.chat import encode_conversations
from andon.data.rewriting import EVAL_ROWS, RULES, TRAIN_ROWS
from andon.data.rows import DataSet, frozen_split, shared_texts
from andon.data.shell import SSC_LABELS, embedded, generate
from andon.data.tokens import byte_tokenizer

SEEDS = st.integers(0, 2**63 - 1)
SIGNS = {
    "needs-quoting": re.compile(r"\$"),
    "non-deterministic": re.compile(r"\$RANDOM|\$\(date \+%s\)|\$\$|mktemp|uuidgen"),
    "non-idempotent": re.compile(r"mkdir (?!-p)|>>|ln -s |mv "),
    "unsafe": re.compile(r"rm -rf /|\| sh\b|\beval |chmod -R 777|of=/dev/"),
}
"""What each class is named for; for `needs-quoting` outside of quotes."""


@given(SEEDS, st.integers(0, 200))
def test_rows_are_a_function_of_the_seed_with_distinct_texts_and_even_classes(seed: int, count: int) -> None:
    data = generate(seed, count)
    assert data.rows == generate(seed, count).rows
    assert len({row.text for row in data.rows}) == len(data) == count
    assert max(data.counts()) - min(data.counts()) <= 1
    assert [row.id for row in data.rows] == list(range(count))
    assert all(5 <= len(row.text.encode()) <= 110 for row in data.rows)


def test_another_seed_makes_other_rows() -> None:
    assert embedded(1)[0].digest != embedded(2)[0].digest


@pytest.mark.parametrize("seed", [0, 42])
def test_each_label_follows_from_its_text(seed: int) -> None:
    for row in generate(seed, 1000).rows:
        unquoted = re.sub(r'"[^"]*"', '""', row.text)
        found = {name for name, sign in SIGNS.items() if sign.search(unquoted if name == "needs-quoting" else row.text)}
        assert found == {SSC_LABELS[row.label]} - {"safe"}, row.text


@pytest.mark.parametrize("seed", [0, 42])
def test_no_text_of_the_evaluation_set_is_trained_on(seed: int) -> None:
    train, held_out = embedded(seed)
    assert shared_texts(train, held_out) == 0
    for data in (train, held_out):
        assert [row.id for row in data.rows] == list(range(len(data)))
        assert data.labels == SSC_LABELS
        assert min(data.counts()) > 0.15 * len(data)


def test_the_default_split_leaves_a_ragged_batch_of_unequal_micro_batches() -> None:
    rows = len(frozen_split(len(embedded(42)[0]), 0.1, 42)[0])
    last = rows % 32
    assert last > 8
    assert last % 8 != 0
    assert 60 <= 2 * -(-rows // 32) <= 130


def bytes_counted(data: DataSet) -> tuple[torch.Tensor, torch.Tensor]:
    counts = torch.stack([torch.bincount(torch.tensor(list(r.text.encode())), minlength=257) for r in data.rows])
    counts[:, 256] = 1
    return counts.float().sqrt(), torch.tensor([row.label for row in data.rows])


def test_counting_bytes_is_not_enough_to_tell_the_classes() -> None:
    train, held_out = embedded(42)
    features, labels = bytes_counted(train)
    weights = torch.zeros(257, 5, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> float:
        value = torch.nn.functional.cross_entropy(features @ weights, labels) + 1e-4 * weights.square().sum()
        (weights.grad,) = torch.autograd.grad(value, [weights])
        return float(value.detach())

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    features, labels = bytes_counted(held_out)
    accuracy = float(((features @ weights).argmax(1) == labels).float().mean())
    assert 0.5 < accuracy < 0.9


# The embedded instructions.


@given(st.integers(0, 2**63 - 1), st.integers(0, 120))
def test_rows_are_a_function_of_the_seed_with_distinct_prompts_and_right_answers(seed: int, count: int) -> None:
    data = rewriting.generate(seed, count)
    assert data == rewriting.generate(seed, count)
    assert len({*data.texts()}) == len(data) == count
    for row in data.rows:
        rule, field = row.messages[0].content.removesuffix(": ").split()
        word = field.rstrip(".")
        assert len(field) == 11
        assert len(set(word)) == len(word)
        letters = list(word)
        following = [chr(ord(each) + 1) if each < "z" else "a" for each in letters]
        wanted = {"copy": letters, "caps": [chr(ord(each) - 32) for each in letters], "next": following}
        assert list(row.messages[1].content) == wanted[rule]
        assert row.source == rule


def test_what_is_held_out_is_never_trained_on() -> None:
    train, held_out = rewriting.embedded(42)
    assert (len(train), len(held_out)) == (TRAIN_ROWS, EVAL_ROWS)
    assert not {*train.texts()} & {*held_out.texts()}
    for each in (train, held_out):
        assert each.ids == tuple(range(len(each)))
        assert {row.source for row in each.rows} == {*RULES}
    assert train.digest != rewriting.embedded(43)[0].digest


def test_answers_are_ragged_and_fit_the_embedded_model() -> None:
    rows = encode_conversations(byte_tokenizer(), rewriting.embedded(0)[0], 128).rows
    assert {sum(map(bool, row.weights)) for row in rows} == set(range(4, 13))
    assert max(len(row.ids) for row in rows) <= 40
