"""Reads files of conversations as rows of messages. All faults of the files are raised at once."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from andon.console.messages import ProblemList, did_you_mean, shown
from andon.data.formats import Record, Table, open_table
from andon.data.origins import ALL_ROWS, Origins, RowSelection
from andon.data.rows import Examples, column_fault, must_be

Form = Literal["messages", "prompt and completion", "prompt and completion as messages", "text"]
"""The format of a data set's rows; all of them have the same one."""

ROLES = ("system", "user", "assistant", "tool")
ANSWERS = "assistant"
"""The role whose messages are trained."""
SOURCE_COLUMN = "source"
"""The column with a row's source, for scores per source; training does not use it."""

_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt and completion": ("prompt", "completion"),
    "text": ("text",),
}
PAIR = ("chosen", "rejected")
"""The columns of a preference: the better and the worse answer to one prompt."""
_KEYS = ("role", "content", "weight", "train", "tool_calls", "tool_call_id", "name")
_SHAREGPT_ROLES = {"human": "user", "gpt": ANSWERS, "function": "tool", "observation": "tool"}


@dataclass(frozen=True, slots=True)
class Message:
    """weight: loss weight of its tokens in fp32, if they are trained at all; 0: untrained.

    extra: a JSON object with more fields for the chat template (tool calls, the name of a tool), or empty.
    tools: in the first message, a JSON list of the tools that the conversation may call, or empty.
    """

    role: str
    content: str
    weight: float = 1.0
    extra: str = ""
    tools: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row. id: its position among all usable rows, from 0. where: its file and line. source: may be empty.

    A row of the form `text` is a single message of the assistant. rejected: of a preference, the conversation with the
    worse answer; `messages` has the better one. side: of half a preference, its column (`halves`).
    """

    id: int
    messages: tuple[Message, ...]
    where: str = ""
    source: str = ""
    rejected: tuple[Message, ...] = ()
    side: str = ""


def halves(rows: Iterable[Conversation]) -> Iterator[Conversation]:
    """The two conversations of each preference: for row n, the chosen one with id 2n, the rejected one with 2n + 1."""
    for row in rows:
        for place, messages in enumerate((row.messages, row.rejected)):
            yield Conversation(2 * row.id + place, messages, row.where, row.source, side=PAIR[place])


@dataclass(frozen=True)
class ConversationSet(Examples):
    """Conversations of one form, in memory."""

    rows: tuple[Conversation, ...]
    source: str
    form: Form
    origins: Origins | None = field(default=None, compare=False, repr=False)
    labels = ()

    @cached_property
    def digest(self) -> str:
        sha = hashlib.sha256()
        add_form(sha, self.form)
        for row in self.rows:
            add_row(sha, row)
        return sha.hexdigest()

    @property
    def sources(self) -> list[str]:
        """The source of each row, or an empty string."""
        return [row.source for row in self.rows]

    def texts(self) -> tuple[str, ...]:
        return tuple(input_text(self.form, row) for row in self.rows)

    def told(self, id_: int) -> tuple[str, str] | None:
        row = self._by_id.get(id_)
        return None if row is None else (row.messages[-1].content + row.messages[-1].extra, input_text(self.form, row))


def input_text(form: Form, row: Conversation) -> str:
    """The input text of a row: its messages except the last, each after its role; for `text` rows, the whole text."""
    if form == "text":
        return row.messages[0].content
    return "\n".join(f"{each.role}: {each.content}{each.extra}" for each in row.messages[:-1])


def add_form(sha: hashlib._Hash, form: Form) -> None:
    """Update the digest of a data set with its form, before its rows."""
    _add(sha, form.encode())


def add_row(sha: hashlib._Hash, row: Conversation) -> None:
    """Update the digest of a data set with a row: every message in order, each part preceded by its length."""
    _add_messages(sha, row.messages)
    if row.rejected:
        _add(sha, b"rejected")  # is no role
        _add_messages(sha, row.rejected)


def _add_messages(sha: hashlib._Hash, messages: tuple[Message, ...]) -> None:
    sha.update(len(messages).to_bytes(8, "little"))
    for message in messages:
        _add(sha, message.role.encode())
        _add(sha, message.content.encode())
        _add(sha, struct.pack("<d", message.weight))
        for part in filter(None, (message.extra, message.tools)):  # unambiguous: JSON begins unlike any role
            _add(sha, part.encode())


def _add(sha: hashlib._Hash, part: bytes) -> None:
    sha.update(len(part).to_bytes(8, "little"))
    sha.update(part)


def read_conversations(
    *paths: str | PathLike[str], selection: RowSelection = ALL_ROWS, pairs: bool = False
) -> ConversationSet:
    """Read .jsonl, .json (one object per line, or an array), .parquet, .csv or .tsv files whose rows have one form.

    `messages` is a list of objects with a `role`, a `content` and optionally a `weight` (0 or more) or `train` (true or
    false). `prompt` and `completion` are two strings, or two lists of such messages; only the completion is trained.
    `text` is trained as a whole. The chat template receives the list in `tools`. ShareGPT's `conversations` and
    Alpaca's `instruction`, `input` and `output` are converted to messages, with their `system`. `source` and `id` are
    read, `chat_template_kwargs` and Alpaca's `history` are faults, and other columns are ignored. A row's id is its
    position among the usable rows, from 0. With several files, rows of a file without any source get its name.

    pairs: rows are preferences. `prompt`, `chosen` and `rejected` are three strings, or three lists of messages.
    Without `prompt`, `chosen` and `rejected` are whole conversations, and their common beginning is the prompt.

    Raises `InputError` with every fault, each as file:line with the offending value.
    """
    reading = Reading(selection, pairs=pairs)
    rows = list(reading.rows(list(map(Path, paths))))
    assert reading.form is not None
    origins = reading.origins
    sources = origins.with_files([row.source for row in rows])
    named = tuple(replace(row, source=source) for row, source in zip(rows, sources, strict=True))
    return ConversationSet(named, origins.source, reading.form, origins)


class Reading:
    """One pass over files. form, first: the form and the place of the first usable row. origins: of all rows."""

    def __init__(self, selection: RowSelection = ALL_ROWS, *, pairs: bool = False) -> None:
        self.form: Form | None = None
        self._pairs = pairs
        self.first, self.origins = "", Origins(selection)

    def rows(self, paths: Iterable[Path]) -> Iterator[Conversation]:
        """Yield the usable rows of the files in order. Raises `InputError` with all faults at the end."""
        yield from self.origins.read(paths, self._parsed)
        self.origins.problems.raise_if_any()

    def _parsed(self, table: Table, record: Record) -> tuple[Conversation, list[str]]:
        where = table.place(record.line)
        faults: list[str] = []
        fields = _as_pair(record.fields, faults) if self._pairs else _as_messages(record.fields, faults)
        form = None if faults else _form(fields, faults)
        if form is not None and form != (self.form or form):
            faults.append(f"has {form}, the rows from {self.first} on have {self.form}; use one form for all")
        answers = PAIR if self._pairs else ("completion",)
        read = [_messages(form, fields, faults, name) for name in answers] if form is not None else [(), ()]
        messages, *others = (_with_tools(each, fields, faults) for each in read)
        rejected = others[0] if self._pairs else ()
        if self._pairs:
            faults[:] = dict.fromkeys(faults)  # of a prompt that both conversations have
            if messages == rejected and not faults:
                faults.append("chosen and rejected are equal: there is nothing to prefer")
            if any(each.weight not in (0.0, 1.0) for each in (*messages, *rejected)):
                faults.append(
                    "has a message with a weight, and an answer is preferred as a whole; leave the weights out"
                )
        if form == "text" and fields.get("tools"):
            faults.append("column 'tools' is there, and a text is learned as it is; write tools into the text")
        if not faults and self.form is None:  # only a usable row decides the form of its file
            self.form, self.first = form, where
        source = record.fields.get(SOURCE_COLUMN)
        return Conversation(len(self.origins), messages, where, "" if source is None else str(source), rejected), faults


def read_prompts(path: Path, column: str | None = None) -> tuple[tuple[Message, ...], ...]:
    """The prompt of each row of a file: from `column`, else from `prompt`, else from `messages`.

    A string becomes one user message. A final answer in a list of messages is dropped. Raises `InputError` with every
    fault, each as file:line.
    """
    problems, prompts = ProblemList(), list[tuple[Message, ...]]()
    names = ("prompt", "messages") if column is None else (column,)
    with closing(open_table(path, problems)) as table:
        for record in table.records:
            faults, messages = list[str](), list[Message]()
            fields = record.fields if column is not None else _as_messages(record.fields, faults)
            name = next((name for name in names if fields.get(name) is not None), None)
            value = None if name is None else fields[name]
            if name is None:
                hint = next(
                    filter(None, (did_you_mean(each, fields) for each in names)), "; name it with --prompt-column"
                )
                wanted, columns = " or ".join(map(repr, names)), ", ".join(map(shown, fields)) or "none"
                faults.append(f"has no column {wanted}; there are {columns}{hint}")
            elif isinstance(value, str):
                faults += filter(None, [column_fault(name, value)])
                messages = [Message("user", value)]
            elif isinstance(value, list):
                messages = _listed(name, value, faults)
                if messages and messages[-1].role == ANSWERS:
                    messages.pop()
                if not messages and not faults:
                    faults.append(f"{name} asks nothing: all that it holds is an answer")
            else:
                faults.append(f"{name} {must_be('a string or a list of messages', value)}")
            prompts.append(_with_tools(tuple(messages), fields, faults))
            for fault in faults:
                problems.add(table.place(record.line), fault)
    if not prompts and not problems:
        problems.add(str(path), "has no rows")
    problems.raise_if_any()
    return tuple(prompts)


def conversations_in(fields: Mapping[str, object]) -> str:
    """The format that identifies a row as a conversation, for messages, or an empty string. A column `text` does not
    identify one: rows of other tasks have it too."""
    for form, columns in _COLUMNS.items():
        if form != "text" and all(fields.get(name) is not None for name in columns):
            return "conversations"
    if isinstance(fields.get("conversations"), list):
        return "'conversations' (ShareGPT)"
    alpaca = "instruction" in fields and "output" in fields and "label" not in fields
    return "'instruction' and 'output' (Alpaca)" if alpaca else ""


def _as_pair(fields: Mapping[str, object], faults: list[str]) -> Mapping[str, object]:
    """The fields of a preference with a `prompt`, without which `chosen` and `rejected` begin. Its form is that of the
    prompt with the chosen answer as `completion`."""
    missing = [name for name in PAIR if fields.get(name) is None]
    there = ", ".join(shown(name) for name, value in fields.items() if value is not None) or "none"
    if missing:
        faults.append(f"has no column {missing[0]!r}, and task dpo compares 'chosen' and 'rejected'; there are {there}")
        return fields
    if fields.get("system"):
        faults.append("column 'system' is there, and is not read: make it the first message of a prompt of messages")
    strange = [(name, fields[name]) for name in PAIR if not isinstance(fields[name], str | list)]
    faults += [f"{name} {must_be('a string or a list of messages', value)}" for name, value in strange]
    if faults:
        return fields
    prompt, (chosen, rejected) = fields.get("prompt"), (fields[name] for name in PAIR)
    lists = [isinstance(each, list) for each in (chosen, rejected)]
    if lists[0] != lists[1] or (isinstance(prompt, list) and not lists[0]):
        faults.append("some of prompt, chosen and rejected are lists of messages; make all lists, or all strings")
        return fields
    if prompt is None or (isinstance(prompt, str) and lists[0]):
        whole: Any = chosen
        shared: Any = _shared(chosen, rejected)
        if prompt is None or shared:  # both are whole conversations, and a prompt string repeats a message
            if not shared:
                why = "chosen and rejected have no common beginning to be the prompt"
                faults.append(f"has no column 'prompt', and {why}; there are {there}")
            elif prompt is not None and all(each.get("content") != prompt for each in shared if isinstance(each, dict)):
                faults.append("prompt is not among the messages that chosen and rejected begin with; remove it")
            prompt, chosen, rejected = shared, whole[len(shared) :], rejected[len(shared) :]  # type: ignore[index]
        else:
            prompt = [{"role": "user", "content": prompt}]
    kept = {name: value for name, value in fields.items() if name not in ("messages", "text")}
    return kept | {"prompt": prompt, "completion": chosen, "chosen": chosen, "rejected": rejected}


def _shared(chosen: Any, rejected: Any) -> Any:
    """The common beginning of two lists of messages, or of two texts, which ends where a word does."""
    both = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    common = [one for one, _ in both]
    if isinstance(chosen, list):
        return common
    while common and not common[-1].isspace():  # the answers may differ within a word
        common.pop()
    return "".join(common).rstrip()


def _as_messages(fields: Mapping[str, object], faults: list[str]) -> Mapping[str, object]:
    source = conversations_in(fields)
    if "ShareGPT" in source:
        messages: list[Any] = []
        for each in fields["conversations"]:  # type: ignore[attr-defined]
            if isinstance(each, dict) and "from" in each:
                role = _SHAREGPT_ROLES.get(str(each["from"]), each["from"])
                more = {key: value for key, value in each.items() if key not in ("from", "value")}
                messages.append(more | {"role": role, "content": each.get("value")})
            else:
                messages.append(each)
    elif "Alpaca" in source:
        texts = {name: fields.get(name) or "" for name in ("instruction", "input", "output")}
        faults += filter(None, (column_fault(name, text) for name, text in texts.items() if text or name != "input"))
        if fields.get("history"):
            faults.append("column 'history' is there, and is not read: write such rows as messages")
        question = "\n\n".join(str(texts[name]) for name in ("instruction", "input") if texts[name])
        messages = [{"role": "user", "content": question}, {"role": ANSWERS, "content": texts["output"]}]
    else:
        return fields
    system = fields.get("system")
    if system and not any(isinstance(each, dict) and each.get("role") == "system" for each in messages):
        messages.insert(0, {"role": "system", "content": system})
    return {name: value for name, value in fields.items() if name != "text"} | {"messages": messages}


def _with_tools(messages: tuple[Message, ...], fields: Mapping[str, object], faults: list[str]) -> tuple[Message, ...]:
    tools = _decoded(fields.get("tools"))
    if not tools or not messages:
        return messages
    if not isinstance(tools, list) or not all(map(_function, tools)):
        faults.append(f"tools {must_be('a list of objects with a name', tools)}")
        return messages
    faults += filter(None, [column_fault("tools", _json(tools))])
    return (replace(messages[0], tools=_json(tools)), *messages[1:])


def _function(value: Any) -> dict[str, Any] | None:
    function = value.get("function", value) if isinstance(value, dict) else None
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def _decoded(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError):
        return value


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # `str` for dates in Parquet


def _extra(message: Mapping[str, object], role: object, faults: list[str]) -> str:
    fields: dict[str, Any] = {}
    calls: Any = _decoded(message.get("tool_calls")) or []
    if calls and role != ANSWERS:
        faults.append(f"is from {shown(role)} and has tool_calls, which only {ANSWERS!r} makes")
    for call in calls if isinstance(calls, list) else [calls]:
        function = _function(call)
        if function is None:
            faults.append(f"tool_calls {must_be('a list of objects with a name and arguments', call)}")
            continue
        called = {"name": function["name"], "arguments": _decoded(function.get("arguments", {}))}
        id_ = {"id": call["id"]} if call.get("id") is not None else {}
        fields.setdefault("tool_calls", []).append({**id_, "type": "function", "function": called})
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            fields[key] = message[key]
            faults += filter(None, [column_fault(key, message[key])])
    faults += filter(None, [column_fault("tool_calls", _json(fields))])
    return _json(fields) if fields else ""


def _form(fields: Mapping[str, object], faults: list[str]) -> Form | None:
    if fields.get("chat_template_kwargs"):  # they would change the rendered text
        what = "column 'chat_template_kwargs' is there, and is not read"
        faults.append(f"{what}: render such rows yourself and give them as text")
    complete = [form for form, columns in _COLUMNS.items() if all(name in fields for name in columns)]
    if len(complete) > 1:
        complete = [form for form in complete if all(fields[name] is not None for name in _COLUMNS[form])]
    if len(complete) > 1:
        faults.append(f"has {' and '.join(complete)}; keep one of them")
        return None
    if not complete:
        wanted = "'messages', 'prompt' and 'completion', or 'text'"
        known = [name for columns in _COLUMNS.values() for name in columns]
        hint = next(filter(None, (did_you_mean(name, known) for name in fields)), "")
        if "prompt" in fields or "completion" in fields:
            missing = "completion" if "prompt" in fields else "prompt"
            hint = f"; {missing!r} is missing"
        faults.append(f"has no column {wanted}; there are {', '.join(map(shown, fields)) or 'none'}{hint}")
        return None
    if complete != ["prompt and completion"]:
        return "messages" if complete == ["messages"] else "text"
    lists = [isinstance(fields[name], list) for name in ("prompt", "completion")]
    if any(lists) and not all(lists):
        faults.append("one of prompt and completion is a list of messages; both must be strings, or both lists")
        return None
    return "prompt and completion as messages" if all(lists) else "prompt and completion"


def _messages(form: Form, fields: Mapping[str, object], faults: list[str], answer: str) -> tuple[Message, ...]:
    """answer: the column of the completion, if the form has one."""
    before = len(faults)
    if form == "messages":
        messages = _listed("messages", fields["messages"], faults)
    elif form == "prompt and completion as messages":
        prompt = _listed("prompt", fields["prompt"], faults)
        completion = _listed(answer, fields[answer], faults)
        faults += [
            f"{answer}[{place}] is from {each.role!r}: a completion is what the model writes and tools say to it"
            for place, each in enumerate(completion)
            if each.role not in (ANSWERS, "tool")
        ]
        messages = [*(replace(each, weight=0.0) if each.role == ANSWERS else each for each in prompt), *completion]
    else:
        texts = {name: fields[name] for name in (("text",) if form == "text" else ("prompt", answer))}
        faults += filter(None, (column_fault(name, text) for name, text in texts.items()))
        roles = [ANSWERS] if form == "text" else ["user", ANSWERS]
        return tuple(Message(role, str(text)) for role, text in zip(roles, texts.values(), strict=True))
    if len(faults) == before:
        if all(each.role != ANSWERS for each in messages):
            faults.append(f"has no message from {ANSWERS!r}: there is nothing to learn from")
        elif messages[-1].role != ANSWERS:
            what = f"the last message is from {messages[-1].role!r}, and nothing answers it"
            faults.append(f"{what}: take it away, or end the row with a message from {ANSWERS!r}")
    return tuple(messages)


def _listed(name: str, value: object, faults: list[str]) -> list[Message]:
    if not isinstance(value, list):
        faults.append(f"{name} {must_be('a list of messages', value)}")
        return []
    if not value:
        faults.append(f"{name} is an empty list")
    messages = []
    for place, item in enumerate(value):
        message, item_faults = _message(item)
        faults += [f"{name}[{place}] {fault}" for fault in item_faults]
        if message is not None:
            messages.append(message)
    return messages


def _message(item: object) -> tuple[Message | None, list[str]]:
    if not isinstance(item, dict):
        return None, [must_be("an object with a role and a content", item)]
    faults: list[str] = []
    role, content = item.get("role"), item.get("content")
    if isinstance(content, list) and content:
        texts = [each.get("text") if isinstance(each, dict) else each for each in content]
        for place, (part, text) in enumerate(zip(content, texts, strict=True)):
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind != "text" or not isinstance(text, str):
                faults.append(f"content[{place}] is of the type {shown(kind)}; only text is read ({shown(part)})")
        content = "".join(map(str, texts))
    extra = _extra(item, role, faults)
    content = "" if content is None and "tool_calls" in extra else content
    if role is None:
        faults.append(f"has no role; known are {', '.join(ROLES)}")
    elif role not in ROLES:
        hint = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        faults.append(f"has the unknown role {shown(role)}; known are {', '.join(ROLES)}{hint}")
    if content is None:
        faults.append("has no content")
    elif not isinstance(content, str) or content.strip() or (role == ANSWERS and "tool_calls" not in extra):
        faults += filter(None, [column_fault("content", content)])
    for key, value in item.items():
        if key not in _KEYS and value is not None and value != []:
            hint = did_you_mean(str(key), _KEYS)
            faults.append(f"has {shown(key)}, which is not read; known are {', '.join(_KEYS)}{hint}")
    weight, train, number = item.get("weight"), item.get("train"), 1.0
    if train is not None and not isinstance(train, bool):
        faults.append(f"train {must_be('true or false', train)}")
    elif weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float)):
        faults.append(f"weight {must_be('a number of 0 or more', weight)}")
    else:
        try:
            (number,) = struct.unpack("<f", struct.pack("<f", (train is not False) if weight is None else weight))
        except (OverflowError, struct.error):  # struct.error: an integer beyond fp64
            number = math.inf
        if not 0.0 <= number < math.inf:
            faults.append(f"weight must be a number from 0 to 3.4e38, is {shown(weight)}")
        if weight is not None and train is not None and train != (number > 0):
            faults.append(f"has train {str(train).lower()} and weight {shown(weight)}; keep one of them")
        if role != ANSWERS and number > 0 and (weight is not None or train is not None):
            own = f"by themselves only messages from {ANSWERS!r} are"
            faults.append(f"is from {shown(role)} and is to be trained; {own}")
    return (None, faults) if faults else (Message(str(role), str(content), number, extra), [])
