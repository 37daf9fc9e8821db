"""How often rows of several files stand in an epoch: exact counts, drawn once, ids that say which row they are."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.console.problems import InputError
from andon.data.conversations import read_conversations
from andon.data.mixing import mixed
from andon.data.readers import read
from andon.data.tagged import read_tagged

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


def test_weights_of_one_leave_ids_as_they_are() -> None:
    """So that files side by side are what they would be in one."""
    assert mixed([0, 2, 3, 5], [3, 3], [1.0, 1.0], 7) == (0, 2, 3, 5)


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
    data = read(one, two, three)
    assert (data.labels, data.ids) == (("0", "1", "2"), (0, 1, 2, 3, 4))
    assert [row.label for row in data.rows] == [1, 1, 0, 1, 2]
    assert data.origins is not None
    assert [data.origins.where(id_) for id_ in (1, 2, 4)] == [f"{one}:3", f"{two}:2", f"{three}:1"]
    assert data.origins.sizes == (2, 2, 1)
    assert data.origins.names() == ("a/rows.jsonl", f"{tmp_path.name}/rows.csv", f"{tmp_path.name}/rows.jsonl")
    assert read(one, three).digest == read(written(tmp_path / "b.jsonl", *(p.read_text() for p in (one, three)))).digest


def test_faults_in_any_of_the_files_are_at_their_line(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", '{"text": "p", "label": "x", "id": 1}', '{"text": "", "label": "x"}')
    two = written(tmp_path / "b.jsonl", '{"text": "q", "label": "y", "id": 1}', '{"text": "r", "label": "y", "id": 1}')
    with pytest.raises(InputError) as caught:
        read(one, two)
    assert [each.where for each in caught.value.problems] == [f"{one}:2", f"{two}:2"]
    empty = written(tmp_path / "c.jsonl", "")
    with pytest.raises(InputError, match="has no rows"):
        read(written(tmp_path / "d.jsonl", '{"text": "p", "label": "x"}'), empty)
    (tmp_path / "x").mkdir()
    with pytest.raises(InputError, match="named twice"):
        read(two, tmp_path / "x" / ".." / "b.jsonl")


def test_a_files_conversations_have_its_name_for_a_source_where_they_name_none(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", '{"text": "p"}', '{"text": "q"}')
    two = written(tmp_path / "b.jsonl", '{"text": "r", "source": "s"}', '{"text": "t"}')
    data = read_conversations(one, two)
    assert [data.source_of(id_) for id_ in data.ids] == ["a.jsonl", "a.jsonl", "s", ""]
    assert [data.rows[id_].where for id_ in (1, 2)] == [f"{one}:2", f"{two}:1"]
    assert read_conversations(one).source_of(0) == ""
    other = written(tmp_path / "c.jsonl", '{"prompt": "p", "completion": "q"}')
    with pytest.raises(InputError, match=f"the rows from {one}:1 on have text"):
        read_conversations(one, other)


def test_words_of_several_files_share_their_tags(tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", '{"tokens": ["p"], "tags": ["B-x"]}')
    two = written(tmp_path / "b.jsonl", '{"tokens": ["q"], "tags": ["A"]}')
    data = read_tagged(one, two)
    assert (data.labels, [row.label for row in data.rows]) == (("A", "B-x"), [(1,), (0,)])
    with pytest.raises(InputError, match="has no rows"):
        read_tagged(one, written(tmp_path / "c.jsonl", ""))
