"""Conversations that are not held: a survey knows of them what reading them says, and a kept one needs no reading."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.console.problems import InputError
from andon.data import surveyed
from andon.data.conversations import read_conversations
from andon.data.rows import repeated_texts, shared_texts
from andon.training import surveys
from andon.training.surveys import Surveys

ROW = st.builds(
    lambda prompt, source: {"prompt": prompt, "completion": "c"} | ({} if source is None else {"source": source}),
    st.sampled_from(["a", "b", "ü c", "d\n"]),
    st.sampled_from([None, "s", "t"]),
)
FILES = st.lists(st.lists(ROW, min_size=1, max_size=7), min_size=1, max_size=3)


def written(folder: Path, files: Sequence[Sequence[dict[str, Any]]]) -> list[Path]:
    """Files of these rows, with an empty line before each second one."""
    paths = []
    for number, rows in enumerate(files):
        lines = ["\n" * (place % 2) + json.dumps(each) + "\n" for place, each in enumerate(rows)]
        paths.append(folder / f"{number}.jsonl")
        paths[-1].write_text("".join(lines))
    return paths


@given(FILES, st.integers(1, 3))
def test_a_survey_says_what_the_rows_say(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[dict[str, Any]]], at_once: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    paths = written(folder, files)
    held = read_conversations(*paths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surveyed, "_ROWS_AT_ONCE", at_once)
        everyone = [Surveys(None, writes=False), *[Surveys(folder / "cache", writes=True)] * 2]
        found = [each.of(paths) for each in everyone]
    for known in found:
        assert (known.digest, known.form, known.ids, known.source) == (held.digest, held.form, held.ids, held.source)
        assert held.origins is not None
        assert [known.origins.where(id_) for id_ in held.ids] == [held.origins.where(id_) for id_ in held.ids]
        assert known.origins.sizes == held.origins.sizes
        assert [known.source_of(id_) for id_ in held.ids] == [held.source_of(id_) for id_ in held.ids]
        assert [each.messages for each in known.rows] == [each.messages for each in held.rows]
        part = held.ids[::-2]
        assert known.subset(part).texts() == held.subset(part).texts()
        assert known.subset(part).fingerprints() == held.subset(part).fingerprints()
        assert repeated_texts(known) == len(held) - len(set(held.texts()))
        assert shared_texts(known, held.subset(part)) == len(part)
        assert known.told(part[0]) == held.told(part[0])
        assert known.told(len(held)) is None
        with pytest.raises(KeyError):
            known.subset([len(held)])


def test_a_survey_finds_all_that_is_wrong(tmp_path: Path) -> None:
    paths = written(tmp_path, [[{"prompt": "a", "completion": ""}, {"prompt": "b"}], [{"prompt": "c"}]])
    with pytest.raises(InputError) as said:
        read_conversations(*paths)
    for known in (Surveys(None, writes=False), Surveys(tmp_path / "cache", writes=True)):
        with pytest.raises(InputError) as caught:
            known.of(paths)
        assert caught.value.problems == said.value.problems
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_rows_that_change_between_two_looks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While they are surveyed, so that no survey stands for other bytes; and when they are read afterwards."""
    (path,) = written(tmp_path, [[{"prompt": "a", "completion": "b"}]])
    known = Surveys(tmp_path / "cache", writes=True).of([path])
    path.write_text(json.dumps({"prompt": "a", "completion": "c"}) + "\n")
    with pytest.raises(InputError, match="has changed while it was read"):
        list(known.rows)

    def meanwhile(*given: Any) -> Any:
        found = surveyed.survey(*given)
        path.write_text(json.dumps({"prompt": "a", "completion": "d"}) + "\n")
        return found

    monkeypatch.setattr(surveys, "survey", meanwhile)
    with pytest.raises(InputError, match="has changed while it was read"):
        Surveys(tmp_path / "cache", writes=True).of([path])
