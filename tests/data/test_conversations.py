"""Files of conversations and of tagged words: the forms, and an error message for each fault."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.console.messages import InputError
from andon.data.conversations import (
    Conversation,
    ConversationSet,
    Message,
    conversations_in,
    read_conversations,
    read_prompts,
)
from andon.data.readers import read
from andon.data.rows import Tagged
from andon.data.tokens import byte_tokenizer

ASKED = {"role": "user", "content": "why"}
SAID = {"role": "assistant", "content": "so"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def lines(folder: Path, *rows: object, name: str = "a.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def faults(path: Path) -> list[str]:
    with pytest.raises(InputError) as caught:
        read_conversations(path)
    return [line.replace(f"{path.parent}{os.sep}", "") for line in str(caught.value).split("\n")]


GOOD: list[dict[str, object]] = [{"messages": [ASKED, SAID]}, {"prompt": "a", "completion": "b"}, {"text": "a"}]


def with_messages(*messages: Any) -> dict[str, object]:
    return {"messages": list(messages)}


def test_messages_are_read_with_their_weights(tmp_path: Path) -> None:
    row = with_messages(
        {"role": "system", "content": ""},
        {**ASKED, "weight": 0, "name": None},
        {**SAID, "weight": 0.5},
        {**ASKED, "train": False},
        {**SAID, "train": False, "weight": None},
        {"role": "tool", "content": "7"},
        {**SAID, "train": True},
    )
    data = read_conversations(lines(tmp_path, row))
    assert data.form == "messages"
    assert [(each.role, each.weight) for each in data.rows[0].messages] == [
        ("system", 1.0),
        ("user", 0.0),
        ("assistant", 0.5),
        ("user", 0.0),
        ("assistant", 0.0),
        ("tool", 1.0),
        ("assistant", 1.0),
    ]


def test_each_form_is_found_by_its_columns(tmp_path: Path) -> None:
    pair = read_conversations(lines(tmp_path, {"prompt": "a", "completion": " b"}))
    lists = read_conversations(lines(tmp_path, {"prompt": [ASKED, SAID, ASKED], "completion": [SAID]}))
    text = read_conversations(lines(tmp_path, {"text": "all", "messages": None}))
    assert (pair.form, lists.form, text.form) == ("prompt and completion", "prompt and completion as messages", "text")
    assert pair.rows[0].messages == (Message("user", "a"), Message("assistant", " b"))
    assert [each.weight for each in lists.rows[0].messages] == [1.0, 0.0, 1.0, 1.0]
    assert text.rows[0].messages == (Message("assistant", "all"),)
    assert (pair.texts(), text.texts()) == (("user: a",), ("all",))


SYSTEM = {"role": "system", "content": "be brief"}
TOOLS = [{"name": "add", "parameters": {}}]
SAME: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so", "weight": 0.5}]},
        with_messages(ASKED, {**SAID, "weight": 0.5}),
    ),
    "ShareGPT with tools": (
        {
            "conversations": [
                {"from": "user", "value": "why"},
                {"from": "gpt", "value": None, "tool_calls": [CALL]},
                {"from": "observation", "value": "7"},
                {"from": "assistant", "value": "so"},
            ],
            "system": "be brief",
            "tools": json.dumps(TOOLS),
        },
        {
            **with_messages(
                SYSTEM, ASKED, {**SAID, "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "7"}, SAID
            ),
            "tools": TOOLS,
        },
    ),
    "its own system message": (
        {"conversations": [{"from": "system", "value": "be brief"}, ASKED, SAID], "system": "be long"},
        with_messages(SYSTEM, ASKED, SAID),
    ),
    "Alpaca": (
        {"instruction": "why", "input": "this", "output": "so", "text": "### Instruction ..."},
        with_messages({**ASKED, "content": "why\n\nthis"}, SAID),
    ),
    "Alpaca without an input": (
        {"instruction": "why", "input": "", "output": "so", "system": "be brief"},
        with_messages(SYSTEM, ASKED, SAID),
    ),
    "parts": (
        with_messages({**ASKED, "content": [{"type": "text", "text": "wh"}, {"type": "text", "text": "y"}]}, SAID),
        with_messages(ASKED, SAID),
    ),
    "arguments as a string": (
        with_messages(ASKED, {**SAID, "tool_calls": [{"name": "add", "arguments": '{"a": 1}'}]}),
        with_messages(ASKED, {**SAID, "tool_calls": [CALL]}),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_what_other_trainers_read_is_read_as_messages(tmp_path: Path, name: str) -> None:
    theirs, ours = SAME[name]
    found, wanted = (read_conversations(lines(tmp_path, row)) for row in (theirs, ours))
    assert found.digest == wanted.digest
    assert found.rows[0].messages == wanted.rows[0].messages
    assert conversations_in(theirs)
    assert not conversations_in({**theirs, "label": 1}) or "Alpaca" not in name
    plain = read_conversations(lines(tmp_path, with_messages(ASKED, SAID)))
    assert (plain.digest == wanted.digest) == (name == "parts")
    assert read_prompts(lines(tmp_path, theirs)) == (wanted.rows[0].messages[:-1],)


NO = {"role": "assistant", "content": "no"}
PAIRS: dict[str, tuple[dict[str, object], ...]] = {
    "texts": (
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " black."},
        {"chosen": "The sky is blue.", "rejected": "The sky is black."},
    ),
    "messages": (
        {"prompt": [SYSTEM, ASKED], "chosen": [SAID], "rejected": [NO]},
        {"chosen": [SYSTEM, ASKED, SAID], "rejected": [SYSTEM, ASKED, NO]},
        {"prompt": "why", "chosen": [SYSTEM, ASKED, SAID], "rejected": [SYSTEM, ASKED, NO], "messages": [ASKED, SAID]},
    ),
    "a question as a text": (
        {"prompt": [ASKED], "chosen": [SAID], "rejected": [NO]},
        {"prompt": "why", "chosen": [SAID], "rejected": [NO]},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_preference_is_the_same_in_each_form_of_trl(tmp_path: Path, name: str) -> None:
    first, *others = (read_conversations(lines(tmp_path, row), pairs=True) for row in PAIRS[name])
    prompt = PAIRS[name][0]["prompt"]
    asked = [Message("user", prompt)] if isinstance(prompt, str) else [Message(**each) for each in prompt]  # type: ignore[attr-defined]
    better, worse = (" blue.", " black.") if name == "texts" else ("so", "no")
    assert first.rows[0].messages == (*asked, Message("assistant", better))
    assert first.rows[0].rejected == (*asked, Message("assistant", worse))
    assert {each.digest for each in others} == {first.digest}
    assert {each.form for each in others} == {first.form}
    swapped = {**PAIRS[name][0], "chosen": PAIRS[name][0]["rejected"], "rejected": PAIRS[name][0]["chosen"]}
    assert read_conversations(lines(tmp_path, swapped), pairs=True).digest != first.digest


BAD_PAIRS: dict[str, tuple[dict[str, object], str]] = {
    "one answer": ({"prompt": "x", "chosen": "a"}, "has no column 'rejected', and task dpo compares 'chosen' and"),
    "mixed": ({"prompt": "x", "chosen": [SAID], "rejected": "b"}, "make all lists, or all strings"),
    "a message alone": ({"chosen": SAID, "rejected": "b"}, "chosen must be a string or a list of messages, is {'role'"),
    "a null": ({"prompt": "x", "chosen": "a", "rejected": None}, "there are 'prompt', 'chosen'"),
    "system": ({"system": "s", "prompt": "x", "chosen": "a", "rejected": "b"}, "column 'system' is there, and is not"),
    "equal": ({"prompt": "x", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
    "nothing shared": ({"chosen": "a b", "rejected": "c b"}, "have no common beginning to be the prompt"),
    "another prompt": ({"prompt": "who", "chosen": [ASKED, SAID], "rejected": [ASKED, NO]}, "prompt is not among"),
    "empty answer": ({"prompt": "x", "chosen": "a", "rejected": ""}, "rejected is empty"),
    "one begins the other": ({"chosen": [ASKED, SAID], "rejected": [ASKED]}, "rejected is an empty list"),
    "bad prompt, said once": ({"prompt": "", "chosen": "a", "rejected": "b"}, "prompt is empty"),
    "weight": ({"prompt": [ASKED], "chosen": [{**SAID, "weight": 0.5}], "rejected": [NO]}, "leave the weights out"),
}


@pytest.mark.parametrize("name", BAD_PAIRS)
def test_a_fault_of_a_preference_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    row, said = BAD_PAIRS[name]
    with pytest.raises(InputError) as caught:
        read_conversations(lines(tmp_path, row), pairs=True)
    (found,) = caught.value.problems
    assert found.where.endswith("a.jsonl:1")
    assert said in found.what


def test_tables_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = tmp_path / "a.csv"
    table.write_text('prompt,completion\n"a, ""b""\nc",d\n')
    assert read_conversations(table).rows[0].messages[0].content == 'a, "b"\nc'
    rows = [[ASKED, {**SAID, "weight": 0.5}, ASKED, SAID]]
    parquet.write_table(arrow.table({"messages": rows, "source": ["x"]}), tmp_path / "a.parquet")
    found = read_conversations(tmp_path / "a.parquet")
    assert [each.weight for each in found.rows[0].messages] == [1.0, 0.5, 1.0, 1.0]
    assert found.digest == read_conversations(lines(tmp_path, with_messages(*rows[0]))).digest
    assert found.sources[0] == "x"
    rows = [[ASKED, {**SAID, "weight": float("nan")}]]  # JSON cannot say it
    parquet.write_table(arrow.table({"messages": rows}), tmp_path / "a.parquet")
    assert faults(tmp_path / "a.parquet") == [
        "a.parquet row 1: messages[1] weight must be a number from 0 to 3.4e38, is nan"
    ]


BAD: dict[str, tuple[object, str]] = {
    "no role": (with_messages({"content": "x"}, SAID), "messages[0] has no role; known are system, user, assistant"),
    "unknown role": (with_messages({"role": "assistent", "content": "x"}), "did you mean 'assistant'?"),
    "empty answer": (with_messages(ASKED, {"role": "assistant", "content": ""}), "messages[1] content is empty"),
    "white answer": (with_messages(ASKED, {"role": "assistant", "content": " \n"}), "content is only white space"),
    "no list": ({"messages": "x"}, "messages must be a list of messages, is 'x'"),
    "null list": ({"messages": None}, "messages must be a list of messages, is null"),
    "empty list": (with_messages(), "messages is an empty list"),
    "no object": (with_messages("hello"), "messages[0] must be an object with a role and a content, is 'hello'"),
    "no content": (with_messages({"role": "user", "content": None}, SAID), "messages[0] has no content"),
    "content of parts": (with_messages({"role": "user", "content": []}, SAID), "content must be a string, is []"),
    "no answer": (with_messages(ASKED), "has no message from 'assistant'"),
    "question last": (with_messages(ASKED, SAID, ASKED), "the last message is from 'user', and nothing answers it"),
    "surrogate": (with_messages({"role": "user", "content": "a\ud800"}, SAID), "messages[0] content holds a lone"),
    "NUL": (with_messages({"role": "user", "content": "a\0"}, SAID), "messages[0] content holds a NUL"),
    "negative": (with_messages(ASKED, {**SAID, "weight": -1}), "weight must be a number from 0 to 3.4e38, is -1"),
    "endless": (with_messages(ASKED, {**SAID, "weight": 10**390}), "weight must be a number from 0"),
    "true weight": (with_messages(ASKED, {**SAID, "weight": True}), "weight must be a number of 0 or more, is True"),
    "number train": (with_messages(ASKED, {**SAID, "train": 1}), "train must be true or false, is 1"),
    "two minds": (with_messages(ASKED, {**SAID, "train": False, "weight": 1}), "has train false and weight 1"),
    "trained question": (with_messages({**ASKED, "weight": 1}, SAID), "is from 'user' and is to be trained"),
    "an image": (with_messages({**ASKED, "content": [{"type": "image"}]}, SAID), "content[0] is of the type 'image'"),
    "calls": (with_messages(ASKED, {**SAID, "tool_calls": [{"id": 1}]}), "must be a list of objects with a name"),
    "surrogate in a call": (
        with_messages(ASKED, {**SAID, "tool_calls": [{"name": "a\ud800"}]}),
        "tool_calls holds a lone",
    ),
    "calls of a user": (with_messages({**ASKED, "tool_calls": [CALL]}, SAID), "from 'user' and has tool_calls"),
    "tools of a text": ({"text": "x", "tools": [{"name": "f"}]}, "a text is learned as it is"),
    "tools": ({**with_messages(ASKED, SAID), "tools": "x"}, "tools must be a list of objects with a name, is 'x'"),
    "nameless": ({**with_messages(ASKED, SAID), "tools": [{"function": "x"}]}, "tools must be a list of objects with"),
    "unread": (
        {**with_messages(ASKED, SAID), "chat_template_kwargs": {"a": 1}},
        "'chat_template_kwargs' is there, and",
    ),
    "speaker": ({"conversations": [{"from": "narrator", "value": "x"}]}, "messages[0] has the unknown role 'narrator'"),
    "no question": ({"instruction": "", "output": "x"}, "instruction is empty"),
    "history": ({"instruction": "x", "output": "x", "history": [["a", "b"]]}, "'history' is there, and is not read"),
    "no column": ({"dialog": [ASKED, SAID]}, "there are 'dialog'"),
    "near column": ({"message": [ASKED, SAID]}, "did you mean 'messages'?"),
    "half": ({"prompt": "x"}, "'completion' is missing"),
    "two forms": ({**with_messages(ASKED, SAID), "text": "x"}, "has messages and text; keep one of them"),
    "half a list": ({"prompt": "x", "completion": [SAID]}, "both must be strings, or both lists"),
    "asking completion": ({"prompt": [ASKED], "completion": [ASKED, SAID]}, "completion[0] is from 'user'"),
    "empty prompt": ({"prompt": "", "completion": "x"}, "prompt is empty"),
    "number": ({"prompt": 7, "completion": "x"}, "prompt must be a string, is 7"),
    "empty text": ({"text": "  "}, "text is only white space"),
    "array": ([1], "must be a JSON object, is [1]"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_fault_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    row, said = BAD[name]
    first = next((good for good in GOOD if isinstance(row, dict) and {*row} & {*good}), GOOD[0])
    if name == "asking completion":
        first = {"prompt": [ASKED], "completion": [SAID]}
    found = faults(lines(tmp_path, first, row))
    assert len(found) == 1
    assert found[0].startswith("a.jsonl:2: ")
    assert said in found[0]


def test_all_faults_are_said_at_once_and_mixed_forms_are_refused(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        {"prompt": "x", "completion": ""},  # unusable, so it does not decide the form
        {"text": "x"},
        with_messages(ASKED, SAID),
        {"text": ""},
    )
    assert faults(path) == [
        "a.jsonl:1: completion is empty",
        "a.jsonl:3: has messages, the rows from a.jsonl:2 on have text; use one form for all",
        "a.jsonl:4: text is empty",
    ]


def test_a_prompt_is_a_text_or_messages_without_the_answer(tmp_path: Path) -> None:
    system = {"role": "system", "content": "be brief"}
    path = lines(
        tmp_path,
        {"prompt": "hi", "messages": [SAID]},
        with_messages(system, ASKED, SAID),
        with_messages(ASKED),
        {"prompt": [ASKED, SAID, ASKED]},
    )
    asked = Message("user", str(ASKED["content"]))
    assert read_prompts(path) == (
        (Message("user", "hi"),),
        (Message("system", "be brief"), asked),
        (asked,),
        (asked, Message("assistant", str(SAID["content"])), asked),
    )
    assert read_prompts(lines(tmp_path, {"q": "hi"}), "q") == ((Message("user", "hi"),),)
    path = lines(tmp_path, {"question": "hi"}, with_messages(SAID), {"prompt": ""}, {"prompt": 7})
    with pytest.raises(InputError) as caught:
        read_prompts(path)
    assert [str(problem).removeprefix(f"{tmp_path}/") for problem in caught.value.problems] == [
        "a.jsonl:1: has no column 'prompt' or 'messages'; there are 'question'; name it with --prompt-column",
        "a.jsonl:2: messages asks nothing: all that it holds is an answer",
        "a.jsonl:3: prompt is empty",
        "a.jsonl:4: prompt must be a string or a list of messages, is 7",
    ]


def test_ids_are_places_and_a_subset_keeps_them(tmp_path: Path) -> None:
    data = read_conversations(lines(tmp_path, {"text": "a", "source": "s"}, {"text": "b"}, {"text": "c", "source": 3}))
    part = data.subset([2, 0])
    assert (data.ids, part.ids, part.texts()) == ((0, 1, 2), (2, 0), ("c", "a"))
    assert data.sources == ["s", "", "3"]
    assert data.rows[2].where.endswith("a.jsonl:3")
    asked = read_conversations(lines(tmp_path, with_messages(ASKED, SAID, {**ASKED, "content": "who"}, SAID)))
    assert asked.told(0) == ("so", "user: why\nassistant: so\nuser: who") == ("so", *asked.texts())
    assert asked.told(1) is None
    with pytest.raises(KeyError):
        part.subset([1])


MESSAGES = st.lists(
    st.builds(
        Message,
        st.sampled_from(["user", "assistant"]),
        st.text(max_size=3),
        st.sampled_from([0.0, 1.0]),
        st.sampled_from(["", '{"name": "a"}']),
        st.sampled_from(["", "[{}]"]),
    ),
    max_size=3,
)


@given(st.lists(MESSAGES, max_size=3), st.lists(MESSAGES, max_size=3))
def test_two_sets_have_one_digest_only_when_they_say_the_same(
    one: list[list[Message]], other: list[list[Message]]
) -> None:
    sets = [
        ConversationSet(tuple(Conversation(id_, tuple(row)) for id_, row in enumerate(rows)), source, "messages")
        for rows, source in ((one, "a"), (other, "b"))
    ]
    assert (sets[0].digest == sets[1].digest) == (one == other)


def test_the_form_is_part_of_the_digest() -> None:
    rows = (Conversation(0, (Message("user", "a"), Message("assistant", "b"))),)
    assert ConversationSet(rows, "", "messages").digest != ConversationSet(rows, "", "prompt and completion").digest


# Tagged words.


def test_words_and_tags_are_read(tmp_path: Path) -> None:
    row = {"tokens": ["Ann", "slept"], "tags": ["B-PER", "O"]}
    data = read(Tagged, lines(tmp_path, row))
    assert (data.labels, [(each.text, each.label) for each in data.rows]) == (("B-PER", "O"), [("Ann slept", (0, 1))])
    assert data.told(0) == ("B-PER, O", "Ann slept")
    other = read(Tagged, lines(tmp_path, row | {"tags": ["O", "B-PER"]}))
    assert other.digest != data.digest


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "2 tokens and 1 tags; each word has one tag"),
        ({"tokens": [], "tags": []}, "tokens is an empty list"),
        ({"tokens": "a b", "tags": ["O", "O"]}, "tokens must be a list of strings, is 'a b'"),
        ({"tokens": ["a", 3], "tags": ["O", "O"]}, "tokens: 3 is a int, and no string"),
        ({"tokens": ["a b"], "tags": ["O"]}, "tokens: 'a b' is not one word"),
        ({"tokens": ["a"], "tags": [1]}, "tags: 1 is a int, and no string"),
        ({"tokens": ["a"], "tags": ["B-PRE"]}, "tag 'B-PRE' is unknown; did you mean 'B-PER'?"),
        ({"tokens": ["a"]}, "has no column 'tags'; there are 'tokens'"),
    ],
)
def test_what_cannot_be_learned_is_told_with_its_line(tmp_path: Path, row: dict[str, object], fault: str) -> None:
    path = lines(tmp_path, {"tokens": ["x"], "tags": ["O"]}, row)
    with pytest.raises(InputError) as caught:
        read(Tagged, path, labels=("B-PER", "O"))
    assert str(caught.value).startswith(f"{path}:2: {fault}")


def test_a_word_is_where_its_first_byte_is() -> None:
    found = byte_tokenizer().encode(["a\u00e9 bc d", "x"], 6, words=True)
    assert [len(row) for row in found.tokens] == [6, 1]
    assert found.firsts == [[0, 4, -1], [0]]
