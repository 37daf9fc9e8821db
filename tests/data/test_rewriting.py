"""The embedded instructions: a function of the seed, right, ragged, and nothing held out is trained on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from andon.data.chat import encode_conversations
from andon.data.rewriting import EVAL_ROWS, RULES, TRAIN_ROWS, embedded, generate
from andon.data.tokens import byte_tokenizer


@given(st.integers(0, 2**63 - 1), st.integers(0, 120))
def test_rows_are_a_function_of_the_seed_with_distinct_prompts_and_right_answers(seed: int, count: int) -> None:
    data = generate(seed, count)
    assert data == generate(seed, count)
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
    train, held_out = embedded(42)
    assert (len(train), len(held_out)) == (TRAIN_ROWS, EVAL_ROWS)
    assert not {*train.texts()} & {*held_out.texts()}
    for each in (train, held_out):
        assert each.ids == tuple(range(len(each)))
        assert {row.source for row in each.rows} == {*RULES}
    assert train.digest != embedded(43)[0].digest


def test_answers_are_ragged_and_fit_the_embedded_model() -> None:
    rows = encode_conversations(byte_tokenizer(), embedded(0)[0], 128).rows
    assert {sum(map(bool, row.weights)) for row in rows} == set(range(4, 13))
    assert max(len(row.ids) for row in rows) <= 40
