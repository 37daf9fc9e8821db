"""Rows and data sets: digests, subsets, splits, labels and class weights, and the mix of several files."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.console.messages import InputError
from andon.data import rewriting
from andon.data.chat import EncodedRow, encode_each
from andon.data.conversations import read_conversations
from andon.data.readers import read
from andon.data.rewriting import EVAL_ROWS, RULES, TRAIN_ROWS
from andon.data.rows import (
    ClassWeights,
    DataSet,
    Row,
    Tagged,
    alike,
    class_weights,
    frozen_split,
    mixed,
    repeated_texts,
    same_kind,
    shared_texts,
)
from andon.data.shell import SSC_LABELS, embedded, generate
from andon.data.tokens import byte_tokenizer

LABELS = ("no", "yes", "maybe")


def made(pairs: list[tuple[str, int]], labels: tuple[str, ...] = LABELS) -> DataSet:
    return DataSet(tuple(Row(place, *pair) for place, pair in enumerate(pairs)), labels, "test")


def test_the_digest_is_sha256_over_length_and_bytes_of_each_text_and_label_name() -> None:
    content = b""
    for part in ("é", "yes", "", "no"):
        content += len(part.encode()).to_bytes(8, "little") + part.encode()
    assert made([("é", 1), ("", 0)]).digest == hashlib.sha256(content).hexdigest()


def test_a_subset_keeps_ids_and_order_and_can_be_taken_again() -> None:
    data = made([("a", 0), ("b", 1), ("c", 2), ("d", 0)])
    some = data.subset([3, 1])
    assert [(row.id, row.text) for row in some.rows] == [(3, "d"), (1, "b")]
    assert some.subset([1]).rows == (data.rows[1],)
    assert some.labels == data.labels
    with pytest.raises(KeyError):
        some.subset([0])


def test_repeated_and_shared_texts_are_counted() -> None:
    train, other = made([("a", 0), ("b", 1), ("a", 0), ("a", 1)]), made([("a", 0), ("c", 1), ("a", 0)])
    assert repeated_texts(train) == [(2, 0), (3, 0)]
    assert shared_texts(train, other) == 2
    assert shared_texts(other, train) == 3


# The validation split.

SIZES = st.integers(2, 400)
FRACTIONS = st.floats(0.001, 0.999)
SEEDS = st.integers(0, 2**63 - 1)


@given(SIZES, FRACTIONS, SEEDS)
def test_every_row_is_in_exactly_one_part_and_neither_is_empty(count: int, fraction: float, seed: int) -> None:
    train, validation = frozen_split(count, fraction, seed)
    assert sorted(train + validation) == list(range(count))
    assert list(train) == sorted(train)
    assert list(validation) == sorted(validation)
    assert 1 <= len(validation) <= count - 1
    assert abs(len(validation) - count * fraction) <= 0.5 or len(validation) in (1, count - 1)


def test_every_row_is_as_likely_to_be_held_back() -> None:
    drawn = [0] * 10
    for seed in range(2000):
        for place in frozen_split(10, 0.3, seed)[1]:
            drawn[place] += 1
    deviation = (2000 * 0.3 * 0.7) ** 0.5
    assert all(abs(times - 600) < 5 * deviation for times in drawn)


def test_fraction_zero_holds_nothing_back() -> None:
    assert frozen_split(3, 0.0, 1) == ((0, 1, 2), ())
    assert frozen_split(1, 0.0, 1) == ((0,), ())


@pytest.mark.parametrize(("count", "fraction"), [(1, 0.1), (0, 0.1), (5, 1.0), (5, -0.1), (5, float("nan"))])
def test_what_cannot_be_split_is_refused(count: int, fraction: float) -> None:
    with pytest.raises(InputError):
        frozen_split(count, fraction, 0)


# Class weights (F-TUNE-005 of the seed) and label maps.

COUNTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=20)
KINDS = st.sampled_from(["uniform", "inverse", "sqrt_inverse"])


@given(KINDS, COUNTS)
def test_weights_are_positive_and_their_sum_is_the_number_of_classes(kind: ClassWeights, counts: list[int]) -> None:
    """F-TUNE-005: the sum is K, so that a weighted loss stays on the scale of the unweighted one."""
    weights = class_weights(kind, counts)
    assert len(weights) == len(counts)
    assert min(weights) > 0
    assert math.isclose(math.fsum(weights), len(counts), rel_tol=1e-12)


@given(COUNTS)
def test_inverse_weights_make_every_class_weigh_the_same(counts: list[int]) -> None:
    exact = Fraction(len(counts)) / sum(Fraction(1, count) for count in counts)
    for weight, count in zip(class_weights("inverse", counts), counts, strict=True):
        assert math.isclose(weight * count, float(exact), rel_tol=1e-12)


@given(COUNTS)
def test_sqrt_inverse_weights_are_as_the_roots_of_the_inverse_ones(counts: list[int]) -> None:
    roots, full = class_weights("sqrt_inverse", counts), class_weights("inverse", counts)
    for root, whole in zip(roots, full, strict=True):
        assert math.isclose((root / roots[0]) ** 2, whole / full[0], rel_tol=1e-9)


def test_even_counts_give_weight_one() -> None:
    for kind in ("uniform", "inverse", "sqrt_inverse"):
        assert class_weights(kind, [7, 7, 7, 7]) == pytest.approx((1.0, 1.0, 1.0, 1.0))
    assert class_weights("uniform", [5, 0]) == (1.0, 1.0)


@pytest.mark.parametrize("kind", ["inverse", "sqrt_inverse"])
def test_every_class_without_rows_is_refused_by_number_or_name(kind: ClassWeights) -> None:
    with pytest.raises(InputError) as caught:
        class_weights(kind, [0, 3, 0])
    assert [problem.what[-1] for problem in caught.value.problems] == ["0", "2"]
    assert all(problem.where == "data.class_weights" for problem in caught.value.problems)
    with pytest.raises(InputError, match="no row has class 'urgent'"):
        class_weights(kind, [3, 0], ("usual", "urgent"))
    with pytest.raises(InputError):
        class_weights("uniform", [])


def test_integers_are_ordered_by_value_and_strings_by_letters(tmp_path: Path) -> None:
    for labels, names in ([10, 9, 10, 0], ("0", "9", "10")), (["10", "9", "a"], ("10", "9", "a")):
        lines = (json.dumps({"text": f"text {place}", "label": label}) for place, label in enumerate(labels))
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        assert read(DataSet, tmp_path / "rows.jsonl").labels == names


def test_cells_of_a_table_are_integers_only_when_all_of_them_are_plain_ones() -> None:
    assert same_kind(["3", "10"], typed=False) == ([3, 10], [])
    assert same_kind(["007", "7"], typed=False) == (["007", "7"], [])
    assert same_kind(["3", "10"], typed=True) == (["3", "10"], [])


@pytest.mark.parametrize("typed", [True, False])
def test_the_labels_of_the_rarer_type_are_the_faults(typed: bool) -> None:
    numbers: list[int | str] = [1, 2, 3] if typed else ["1", "2", "3"]
    assert [place for place, _ in same_kind([*numbers, "a", "b"], typed)[1]] == [3, 4]
    assert [place for place, _ in same_kind([numbers[0], "a", "b"], typed)[1]] == [0]


def test_names_that_look_alike_are_found() -> None:
    composed, apart = "caf\u00e9", "cafe\u0301"
    assert alike(["pos", "neg", "pos ", "POS", composed, "cafe", apart]) == [["pos", "pos ", "POS"], [composed, apart]]


# Weights of files: how often their rows appear in an epoch.

FILES = st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.3])), min_size=1)


@given(FILES, st.integers(0, 3), st.data())
def test_each_file_stands_there_as_often_as_its_weight_says(
    files: list[tuple[int, float]], seed: int, data: st.DataObject
) -> None:
    total = sum(size for size, _ in files)
    held = data.draw(st.sets(st.integers(0, total - 1), max_size=total // 3))
    ids = [id_ for id_ in range(total) if id_ not in held]
    sizes, weights = [size for size, _ in files], [weight for _, weight in files]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    own = [[id_ for id_ in ids if start <= id_ < start + size] for start, size in zip(starts, sizes, strict=True)]
    wanted = [
        int(len(rows) * Fraction(str(weight)) + Fraction(1, 2)) for rows, weight in zip(own, weights, strict=True)
    ]
    if any(rows and not count for rows, count in zip(own, wanted, strict=True)):
        with pytest.raises(InputError, match="leaves none"):
            mixed(ids, sizes, weights, seed)
        return
    found = mixed(ids, sizes, weights, seed)
    assert found == tuple(sorted(set(found))) == mixed(ids, sizes, weights, seed)
    stands = Counter(id_ % total for id_ in found)
    assert stands.keys() <= set(ids)
    for rows, count in zip(own, wanted, strict=True):
        times = [stands[row] for row in rows]
        assert sum(times) == count
        assert max(times, default=0) - min(times, default=0) <= 1
        assert all(row + copy * total in found for row in rows for copy in range(stands[row]))


def test_what_is_drawn_is_a_matter_of_the_seed_and_the_files_place() -> None:
    first, other = (mixed(range(80), [40, 40], [0.5, 0.5], seed) for seed in (1, 2))
    assert first != other
    assert [id_ for id_ in first if id_ < 40] not in ([id_ - 40 for id_ in first if id_ >= 40], list(range(20)))


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_rows_of_several_files_have_ids_and_places_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    one = written(tmp_path / "a" / "rows.jsonl", '{"text": "p", "label": 1}', "", '{"text": "q", "label": 1}')
    two = written(tmp_path / "rows.csv", "text,label", "r,0", "s,1")
    three = written(tmp_path / "rows.jsonl", '{"text": "t", "label": 2}')
    data = read(DataSet, one, two, three)
    assert (data.labels, data.ids) == (("0", "1", "2"), (0, 1, 2, 3, 4))
    assert [row.label for row in data.rows] == [1, 1, 0, 1, 2]
    assert data.origins is not None
    assert [data.origins.where(id_) for id_ in (1, 2, 4)] == [f"{one}:3", f"{two}:2", f"{three}:1"]
    assert data.origins.sizes == (2, 2, 1)
    assert data.origins.names() == ("a/rows.jsonl", f"{tmp_path.name}/rows.csv", f"{tmp_path.name}/rows.jsonl")
    assert (
        read(DataSet, one, three).digest
        == read(DataSet, written(tmp_path / "b.jsonl", *(p.read_text() for p in (one, three)))).digest
    )


def test_faults_in_any_of_the_files_are_at_their_line(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", '{"text": "p", "label": "x", "id": 1}', '{"text": "", "label": "x"}')
    two = written(tmp_path / "b.jsonl", '{"text": "q", "label": "y", "id": 1}', '{"text": "r", "id": 1}')
    with pytest.raises(InputError) as caught:
        read(DataSet, one, two)
    assert [each.where for each in caught.value.problems] == [f"{one}:2", f"{two}:2"]
    empty = written(tmp_path / "c.jsonl", "")
    with pytest.raises(InputError, match="has no rows"):
        read(DataSet, written(tmp_path / "d.jsonl", '{"text": "p", "label": "x"}'), empty)
    (tmp_path / "x").mkdir()
    with pytest.raises(InputError, match="named twice"):
        read(DataSet, two, tmp_path / "x" / ".." / "b.jsonl")


def test_a_files_conversations_have_its_name_for_a_source_where_they_name_none(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", '{"text": "p"}', '{"text": "q"}')
    two = written(tmp_path / "b.jsonl", '{"text": "r", "source": "s"}', '{"text": "t"}')
    data = read_conversations(one, two)
    assert data.sources == ["a.jsonl", "a.jsonl", "s", ""]
    assert [data.rows[id_].where for id_ in (1, 2)] == [f"{one}:2", f"{two}:1"]
    assert read_conversations(one).sources[0] == ""
    other = written(tmp_path / "c.jsonl", '{"prompt": "p", "completion": "q"}')
    with pytest.raises(InputError, match=f"the rows from {one}:1 on have text"):
        read_conversations(one, other)


def test_words_of_several_files_share_their_tags(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", '{"tokens": ["p"], "tags": ["B-x"]}')
    two = written(tmp_path / "b.jsonl", '{"tokens": ["q"], "tags": ["A"]}')
    data = read(Tagged, one, two)
    assert (data.labels, [row.label for row in data.rows]) == (("A", "B-x"), [(1,), (0,)])
    with pytest.raises(InputError, match="has no rows"):
        read(Tagged, one, written(tmp_path / "c.jsonl", ""))


# The embedded data sets: functions of the seed, disjoint, ragged, with labels that follow from the text.


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
    assert train.digest != embedded(seed + 1)[0].digest
    for data in (train, held_out):
        assert [row.id for row in data.rows] == list(range(len(data)))
        assert data.labels == SSC_LABELS
        assert min(data.counts()) > 0.15 * len(data)


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
    rows: list[EncodedRow] = []
    data, _ = rewriting.embedded(0)
    encode_each(byte_tokenizer(), data.form, data.rows, 128, "assistant", rows.append)
    assert {sum(map(bool, row.weights)) for row in rows} == set(range(4, 13))
    assert max(len(row.ids) for row in rows) <= 40
