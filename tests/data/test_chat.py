"""Conversations to ids: which tokens count, to the token, by every template, and what is refused."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from andon.console.messages import InputError
from andon.data import chat as templates
from andon.data.chat import EncodedRow, Encoding, TrainOn, encode_each, encode_prompt, prompt_format, show_row
from andon.data.conversations import Conversation, ConversationSet, Form, Message
from andon.data.tokens import Tokenizer, byte_tokenizer, pretrained_tokenizer

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_WITHOUT_STOP = MARKED.replace(
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
    "{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}",
)
LAST_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if loop.last %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
)
END_MARKED = MARKED + "{% generation %}{{ eos_token }}{% endgeneration %}"
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As several templates in use: the last answer begins with thinking, earlier answers are shown without."""
CLOSING = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
"""As other templates: an end token after the conversation, and an end of each turn before it."""
BOS_EACH = "{{ bos_token }}" + CHATML

TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}MARK"
    "{{ m.content }}{% for c in m.tool_calls %}{{ '[' + c.function.name + ' ' }}{{ c.function.arguments | tojson }}]"
    "{% endfor %}{{ '<|im_end|>' }}ENDMARK{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS_MARKED = TOOLS.replace("ENDMARK", "{% endgeneration %}").replace("MARK", "{% generation %}")
CALL = Message(
    "assistant", "", extra='{"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}'
)
TOOL_TALK = (
    Message("user", "sum", tools='[{"name": "add"}]'),
    CALL,
    Message("tool", "3", extra='{"name": "add"}'),
    Message("assistant", "it is 3"),
)

TALK = (
    Message("system", "be brief"),
    Message("user", "hi"),
    Message("assistant", "yo"),
    Message("user", "who\n"),
    Message("assistant", " me "),
)


def tokenizer(
    template: str | None = None,
    *,
    eos: str = "<|im_end|>",
    pad: str = "<pad>",
    begins: bool = False,
    merges: Iterable[tuple[str, str]] = (),
) -> Tokenizer:
    joined = ["".join(pair) for pair in merges]
    vocabulary = {symbol: number for number, symbol in enumerate((*SPECIALS, *BYTES, *joined))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if begins:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token="<s>",
        eos_token=eos,
        unk_token="<unk>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    wrapped.chat_template = template
    return Tokenizer(wrapped, vocabulary[pad], vocabulary["<unk>"])


@dataclass(frozen=True)
class Encoded(Encoding):
    rows: tuple[EncodedRow, ...] = ()


def encode_conversations(
    tokens: Tokenizer, data: ConversationSet, most: int, train_on: TrainOn = "assistant"
) -> Encoded:
    rows: list[EncodedRow] = []
    found = encode_each(tokens, data.form, data.rows, most, train_on, rows.append)
    return Encoded(**vars(found), rows=tuple(rows))


def rows_of(*talks: Sequence[Message], form: Form = "messages") -> ConversationSet:
    rows = (Conversation(place, tuple(talk), f"a.jsonl:{place + 1}") for place, talk in enumerate(talks))
    return ConversationSet(tuple(rows), "a.jsonl", form)


def pair(prompt: str, completion: str) -> ConversationSet:
    return rows_of((Message("user", prompt), Message("assistant", completion)), form="prompt and completion")


def text(*texts: str) -> ConversationSet:
    return rows_of(*((Message("assistant", each),) for each in texts), form="text")


def refused(tokens: Tokenizer, data: ConversationSet, most: int = 1000, train_on: TrainOn = "assistant") -> list[str]:
    with pytest.raises(InputError) as caught:
        encode_conversations(tokens, data, most, train_on)
    return str(caught.value).split("\n")


def written(*parts: str | tuple[str, float]) -> tuple[list[int], list[float]]:
    """Ids and weights of a row, from its parts: text that does not count, or text with its weight.

    Special tokens are written by their names; each other byte is one token.
    """
    vocabulary = {symbol: number for number, symbol in enumerate((*SPECIALS, *BYTES))}
    ids: list[int] = []
    weights: list[float] = []
    for part in parts:
        letters, weight = (part, 0.0) if isinstance(part, str) else part
        while letters:
            name = next((each for each in SPECIALS if letters.startswith(each)), None)
            found = [vocabulary[name]] if name else [vocabulary[letter] for letter in as_symbols(letters[0])]
            letters = letters[len(name or "x") :]
            ids += found
            weights += [weight] * len(found)
    return ids, weights


def as_symbols(letter: str) -> list[str]:
    (found,) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(letter)
    return list(found[0])


def one(encoded: Encoded) -> tuple[list[int], list[float]]:
    (row,) = encoded.rows
    return list(row.ids), list(row.weights)


ANSWERED = written(
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ("yo<|im_end|>", 1.0),
    "\n<|im_start|>user\nwho\n<|im_end|>\n<|im_start|>assistant\n",
    (" me <|im_end|>", 1.0),
    "\n",
)


@pytest.mark.parametrize(
    ("template", "source"),
    [
        (CHATML, "prefixes of the template, verified"),
        (MARKED, "the template's generation marks"),
        (MARKED_WITHOUT_STOP, "the template's generation marks, and the stop token after each"),
    ],
)
def test_answers_and_their_stop_tokens_count_and_nothing_else(template: str, source: str) -> None:
    encoded = encode_conversations(tokenizer(template), rows_of(TALK), 1000)
    assert one(encoded) == ANSWERED
    assert encoded.mask_source == source
    assert encoded.stops == (SPECIALS.index("<|im_end|>"),)
    assert encoded.notes == ()


WORDS = st.text(st.sampled_from("ab \n<é"), min_size=1, max_size=6)
ANSWERS = WORDS.filter(lambda word: bool(word.strip()))
WEIGHTS = st.sampled_from([0.0, 0.25, 1.0])
TURNS = st.lists(st.tuples(WORDS, ANSWERS, WEIGHTS), min_size=1, max_size=4).filter(
    lambda turns: any(turn[2] for turn in turns)
)


@given(TURNS, st.sampled_from([CHATML, MARKED, MARKED_WITHOUT_STOP]))
def test_each_message_has_its_own_weight(turns: list[tuple[str, str, float]], template: str) -> None:
    talk = [m for asked, said, weight in turns for m in (Message("user", asked), Message("assistant", said, weight))]
    parts: list[str | tuple[str, float]] = []
    for asked, said, weight in turns:
        parts += [f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n", (f"{said}<|im_end|>", weight), "\n"]
    assert one(encode_conversations(tokenizer(template), rows_of(talk), 1000)) == written(*parts)


def test_a_template_that_shows_earlier_answers_otherwise_is_refused() -> None:
    """What would be learned there is not what the model writes when it answers; the last answer alone can be."""
    said = refused(tokenizer(THINKING), rows_of(TALK))
    assert len(said) == 1
    assert said[0].startswith("a.jsonl:1: the chat template writes message 2 differently if more messages follow")
    last = [Message("assistant", "yo", 0.0) if each.content == "yo" else each for each in TALK]
    ids, weights = one(encode_conversations(tokenizer(THINKING), rows_of(last), 1000))
    assert trained(ids, weights) == written("<think></think> me <|im_end|>")[0]


def trained(ids: list[int], weights: list[float]) -> list[int]:
    return [id_ for id_, weight in zip(ids, weights, strict=True) if weight]


def test_an_end_token_behind_the_whole_is_no_part_of_an_answer() -> None:
    tokens = tokenizer(CLOSING, eos="</s>")
    encoded = encode_conversations(tokens, rows_of(TALK), 1000)
    assert one(encoded) == (ANSWERED[0] + [2], ANSWERED[1] + [0.0])
    assert encoded.stops == (SPECIALS.index("<|im_end|>"),)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML.replace("<|im_end|>", "."), "closes message 2 with no special token (it ends in 'yo.\\n')"),
        (CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n...'"), "does not begin the whole row"),
        (CHATML.replace("m.content", "(m.content if m.role == 'user' else '')"), "leaves out message 0 ('be brief')"),
        (
            CHATML.replace("m.content", "(m.content | map(attribute='text') | join)"),
            "leaves out message 0 ('be brief')",
        ),
        ("{{ raise_exception('roles must alternate') }}", "the model's chat template refuses it: roles must alternate"),
        ("{{ messages[9].content }}", "the model's chat template refuses it: list object has no element 9"),
        ("{{ ''.__class__.__mro__ }}", "the model's chat template refuses it: access to attribute '__class__'"),
        ("{{ 1 // 0 }}", "the model's chat template refuses it: integer division or modulo by zero"),
        (
            MARKED.replace("{% generation %}{{ m.content", "{{ m.content }}{% generation %}{{ ''"),
            "message 2 is in none of",
        ),
        (LAST_MARKED, "message 2 is in none of the 1 places that the chat template marks"),
        (MARKED_WITHOUT_STOP.replace("<|im_end|>", "."), "closes message 2 with no special token"),
    ],
)
def test_a_template_from_which_no_mask_follows_is_refused_with_the_row(template: str, said: str) -> None:
    found = refused(tokenizer(template), rows_of(TALK))
    assert found[0].startswith("a.jsonl:1: ")
    assert said in found[0]


def test_an_answer_that_only_repeats_its_prompt_must_be_there_too() -> None:
    mute = tokenizer(CHATML.replace("m.content", "(m.content if m.role == 'user' else '')"))
    said = refused(mute, rows_of((Message("user", "yo"), Message("assistant", "yo"))))
    assert said == ["a.jsonl:1: the chat template leaves out message 1"]


AFTER_THINKING = "m.content.split('</think>')[-1]"
THOUGHT = (Message("user", "is 4 even ?"), Message("assistant", "<think>4 is 2 x 2</think>yes"))


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_a_template_that_drops_the_reasoning_is_refused(template: str, train_on: TrainOn) -> None:
    """Templates of reasoning models keep what stands behind </think>: the reasoning would not be trained."""
    dropping = tokenizer(template.replace("m.content", AFTER_THINKING))
    with pytest.raises(InputError, match=r"leaves out what message 1 says before </think> \('4 is 2 x 2'\)"):
        encode_conversations(dropping, rows_of(THOUGHT), 1000, train_on)
    kept = encode_conversations(tokenizer(template), rows_of(THOUGHT), 1000, train_on)
    assert kept.rows[0].cut == 0
    untrained = (*THOUGHT[:1], Message("assistant", THOUGHT[1].content, 0.0), Message("user", "so"), TALK[2])
    assert encode_conversations(dropping, rows_of(untrained), 1000).rows[0].cut == 0


def test_a_template_may_move_the_reasoning() -> None:
    moved = CHATML.replace(
        "m.content", "(m.content | replace('<think>', '<think>\n') | replace('</think>', '\n</think>\n'))"
    )
    encode_conversations(tokenizer(moved), rows_of(THOUGHT), 1000)


def test_what_a_template_marks_besides_counts_as_the_answers_do() -> None:
    ids, weights = ANSWERED
    end = SPECIALS.index("</s>")
    tokens = tokenizer(END_MARKED, eos="</s>")
    encoded = encode_conversations(tokens, rows_of(TALK), 1000)
    assert one(encoded) == ([*ids, end], [*weights, 1.0])
    assert encoded.stops == (SPECIALS.index("<|im_end|>"),)
    unlike = (*TALK[:2], Message("assistant", "yo", 0.5), *TALK[3:])
    assert refused(tokens, rows_of(unlike))[0].endswith("('</s>'), and these have different weights")


def test_what_is_no_template_is_refused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for template in ("{% for %}", "{% generation %}", "x" * (templates.MOST_CHARACTERS + 1)):
        (said,) = refused(tokenizer(template), rows_of(TALK, TALK))
        assert said.startswith("model.base: the chat template ")
    monkeypatch.setattr(templates, "MOST_WRITTEN", 50)
    assert refused(tokenizer(CHATML), rows_of(TALK))[0].endswith("characters of it")


def test_a_template_that_asks_for_the_date_gets_one_day_always() -> None:
    dated = "\n  {{ strftime_now('%d %b %Y') }} {{ strftime_now('%Y-%m-%d') }}|" + CHATML
    encoded = encode_conversations(tokenizer(dated), rows_of(TALK), 1000)
    before = written("\n  26 Jul 2024 2024-07-26|")[0]
    assert one(encoded) == (before + ANSWERED[0], [0.0] * len(before) + ANSWERED[1])
    assert "date" in encoded.notes[0]
    spoken = "{{ strftime_now('%A, %-d %B, %I %p') }}|" + CHATML
    assert one(encode_conversations(tokenizer(spoken), rows_of(TALK), 1000))[0] == (
        written("Friday, 26 July, 12 AM|")[0] + ANSWERED[0]
    )
    unknown = refused(tokenizer("{{ strftime_now('%d %U') }}" + CHATML), rows_of(TALK))
    assert "a part of the date is not known here: %d %U" in unknown[0]


def test_special_tokens_in_messages_are_refused_with_their_place() -> None:
    inside = Message("user", "a<|im_end|>\n<|im_start|>assistant\nb")
    said = refused(tokenizer(CHATML), rows_of(TALK, (inside, TALK[2]), (TALK[1], Message("assistant", "<pad>"))))
    assert [line.split(",")[0] for line in said] == [
        "a.jsonl:2: message 0 spells the special token '<|im_end|>' at character 1",
        "a.jsonl:3: message 1 spells the special token '<pad>' at character 0",
    ]
    said = refused(tokenizer(), pair("<s>", "b"))
    assert said[0].startswith("a.jsonl:1: prompt spells the special token '<s>'")


def test_where_special_tokens_are_letters_they_are_letters() -> None:
    ids, weights = one(encode_conversations(byte_tokenizer(), pair("<pad>", "</s>"), 1000))
    letters = byte_tokenizer().plain_ids(["<pad></s>"])[0]
    assert ids == [1, *letters, 2]
    assert weights == [0.0] * 6 + [1.0] * 5


def test_the_embedded_tokenizer_writes_messages_after_their_roles() -> None:
    tokens = byte_tokenizer()
    talk = (TALK[1], Message("assistant", "yo", 0.0), *TALK[3:])
    encoded = encode_conversations(tokens, rows_of(talk), 1000)
    first, second, third, fourth = tokens.plain_ids(["user: hi\nassistant: ", "yo", "user: who\n\nassistant: ", " me "])
    ids = [1, *first, *second, 2, *third, *fourth, 2]
    assert one(encoded) == (ids, [0.0] * (len(ids) - 5) + [1.0] * 5)
    assert encoded.mask_source == "messages, each after its role"


def test_a_row_begins_with_one_begin_token_at_most() -> None:
    begun = one(encode_conversations(tokenizer(BOS_EACH, begins=True), rows_of(TALK), 1000))
    assert begun == ([1, *ANSWERED[0]], [0.0, *ANSWERED[1]])
    end = SPECIALS.index("<|im_end|>")
    letters = written("ab")[0]
    for begins, start in ((True, [1]), (False, [])):
        tokens = tokenizer(begins=begins)
        assert one(encode_conversations(tokens, pair("a", "b"), 9))[0] == [*start, *letters, end]
        assert one(encode_conversations(tokens, text("ab"), 9))[0] == [*start, *letters, end]
        assert one(encode_conversations(tokens, text("<s>ab"), 9))[0] == [1, *letters, end]
    twice = refused(tokenizer("{{ bos_token }}" + BOS_EACH), rows_of(TALK))
    assert "two begin tokens" in twice[0]


def test_an_end_token_that_also_pads_is_learned() -> None:
    tokens = tokenizer(CHATML, pad="<|im_end|>")
    assert tokens.pad_id == SPECIALS.index("<|im_end|>")
    assert one(encode_conversations(tokens, rows_of(TALK), 1000)) == ANSWERED
    assert one(encode_conversations(tokens, text("ab"), 9))[0][-1] == tokens.pad_id


def test_a_text_counts_as_a_whole_but_for_its_first_token() -> None:
    encoded = encode_conversations(tokenizer(), text("ab", "a<|im_end|>", "<|im_start|>b"), 1000)
    assert [(list(row.ids), list(row.weights)) for row in encoded.rows] == [
        written("a", ("b<|im_end|>", 1.0)),
        written("a", ("<|im_end|>", 1.0)),
        written("<|im_start|>", ("b<|im_end|>", 1.0)),
    ]
    assert encoded.mask_source == "all tokens"
    assert encoded.notes == ("2 rows of text spell special tokens, which are read as such (first: a.jsonl:2)",)


def test_all_tokens_can_be_trained_and_a_message_left_out() -> None:
    encoded = encode_conversations(tokenizer(CHATML), rows_of(TALK), 1000, "all")
    ids, weights = one(encoded)
    assert encoded.stops == encode_conversations(tokenizer(CHATML), rows_of(TALK), 1000).stops != ()
    assert ids == ANSWERED[0]
    assert weights == [0.0] + [1.0] * (len(ids) - 1)
    talk = (TALK[0], Message("user", "hi", 0.0), Message("assistant", "yo", 0.5))
    expected = written(
        "<|im_start|>",
        ("system\nbe brief<|im_end|>\n", 1.0),
        "<|im_start|>user\nhi<|im_end|>\n",
        ("<|im_start|>assistant\n", 1.0),
        ("yo<|im_end|>", 0.5),
        ("\n", 1.0),
    )
    assert one(encode_conversations(tokenizer(CHATML), rows_of(talk), 1000, "all")) == expected


@pytest.mark.parametrize("template", [TOOLS.replace("ENDMARK", "").replace("MARK", ""), TOOLS_MARKED])
def test_tool_calls_are_trained_and_what_tools_say_is_not(template: str) -> None:
    tokens = tokenizer(template)
    start = '<|im_start|>system\n{"name": "add"}<|im_end|>\n<|im_start|>user\nsum<|im_end|>\n<|im_start|>assistant\n'
    expected = written(
        start,
        ('[add {"a": 1}]<|im_end|>', 1.0),
        "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n",
        ("it is 3<|im_end|>", 1.0),
        "\n",
    )
    assert one(encode_conversations(tokens, rows_of(TOOL_TALK), 1000)) == expected
    assert encode_prompt(tokens, "messages", TOOL_TALK[:1]) == written(start)[0]
    spelled = (*TOOL_TALK[:1], replace(CALL, extra=CALL.extra.replace("add", "<s>")))
    assert "spells the special token '<s>'" in refused(tokens, rows_of(spelled))[0]


def test_a_template_that_writes_no_tools_or_no_calls_is_refused() -> None:
    (said,) = refused(tokenizer(CHATML), rows_of(TOOL_TALK))
    assert said == "a.jsonl:1: the chat template leaves out the tool 'add'"
    (said,) = refused(tokenizer(CHATML), rows_of((replace(TOOL_TALK[0], tools=""), *TOOL_TALK[1:])))
    assert said == "a.jsonl:1: the chat template leaves out message 1 ('add')"
    (said,) = refused(byte_tokenizer(), rows_of(TOOL_TALK))
    assert said == "a.jsonl:1: tools need a chat template, and the tokenizer has none"


def test_a_skipped_row_keeps_its_place_and_trains_nothing() -> None:
    tokens, kept = tokenizer(CHATML), list[EncodedRow]()
    long = (Message("user", "x" * 90), TALK[2])
    spelled = (Message("user", "<s>"), TALK[2])
    data = rows_of(TALK, long, spelled, TALK)
    found = encode_each(tokens, data.form, data.rows, 90, "assistant", kept.append, skip_bad=True)
    assert [row.id for row in kept] == [0, 1, 2, 3]
    assert [any(row.weights) for row in kept] == [True, False, False, True]
    assert [(id_, where) for id_, where, _ in found.skipped] == [(1, "a.jsonl:2"), (2, "a.jsonl:3")]
    assert "model.max_length is 90" in found.skipped[0][2]
    with pytest.raises(InputError) as caught:
        encode_each(tokens, "messages", rows_of(long).rows, 90, "assistant", kept.append, positions=64)
    assert "the model has 64 positions" in str(caught.value)
    assert "--set model.max_length" not in str(caught.value)


def test_rows_are_cut_at_their_end_and_it_is_said_what_is_lost() -> None:
    prompt = len(written("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")[0])
    talk = (TALK[1], Message("assistant", "abcd"))
    encoded = encode_conversations(tokenizer(CHATML), rows_of(talk, (TALK[1], TALK[2])), prompt + 4)
    assert list(encoded.rows[0].weights) == [0.0] * prompt + [1.0] * 4
    assert [(row.cut, row.cut_trained) for row in encoded.rows] == [(2, 1), (0, 0)]
    assert encoded.notes == (f"1 row is cut to {prompt + 4} tokens: 2 tokens are dropped, 1 of them to be trained",)
    said = refused(tokenizer(CHATML), rows_of(talk), prompt)
    what = f"its first trained token is number {prompt + 1}, and model.max_length is {prompt}"
    remedy = (
        f"--set model.max_length={prompt + 1} is the least that sees one; to skip such rows: --set data.bad_rows=skip"
    )
    assert said == [f"a.jsonl:1: no token of it would be trained: {what}; {remedy}"]
    enough = encode_conversations(tokenizer(CHATML), rows_of(talk), prompt + 1)
    assert [weight > 0 for weight in enough.rows[0].weights].count(True) == 1
    untrained = (TALK[1], Message("assistant", "abcd", 0.0))
    assert refused(tokenizer(CHATML), rows_of(untrained))[0].endswith("all its answers have weight 0")
    assert refused(tokenizer(CHATML), rows_of(talk), 1)[0].startswith("model.max_length: must be at least 2")


def test_a_token_across_the_beginning_of_an_answer_is_refused() -> None:
    tokens = tokenizer(merges=[("Ġ", "b")])
    assert trained(*one(encode_conversations(tokens, pair("a", " b"), 9))) == [len(SPECIALS) + 256, 5]
    said = refused(tokens, pair("a ", "b"))
    assert said[0].startswith("a.jsonl:1: the last token before completion and its first one merge into another")


def test_messages_need_a_template_and_a_prompt_does_not() -> None:
    said = refused(tokenizer(), rows_of(TALK))
    assert said[0].startswith("model.base: the tokenizer has no chat template")
    encoded = encode_conversations(tokenizer(), pair("ab", "cd"), 9)
    assert one(encoded) == written("ab", ("cd<|im_end|>", 1.0))
    assert encoded.mask_source == "prompt and completion"
    by_template = encode_conversations(tokenizer(CHATML), pair("ab", "cd"), 99)
    assert one(by_template) == written(
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n", ("cd<|im_end|>", 1.0), "\n"
    )


def test_an_answer_to_which_nothing_leads_is_refused_unless_it_does_not_count() -> None:
    first = (Message("assistant", "hello"), *TALK[1:3])
    assert refused(tokenizer(CHATML), rows_of(first))[0].startswith("a.jsonl:1: begins with an answer")
    quiet = (Message("assistant", "hello", 0.0), *TALK[1:3])
    assert trained(*one(encode_conversations(tokenizer(CHATML), rows_of(quiet), 99))) == written("yo<|im_end|>")[0]


@pytest.mark.parametrize(
    "tokens", [tokenizer(CHATML), tokenizer(MARKED), tokenizer(BOS_EACH, begins=True), byte_tokenizer()]
)
def test_a_model_is_asked_as_it_was_trained(tokens: Tokenizer) -> None:
    for data in (rows_of(TALK[:3]), pair("why ", "so")):
        ids, weights = one(encode_conversations(tokens, data, 999))
        first = next(place for place, weight in enumerate(weights) if weight)
        assert encode_prompt(tokens, data.form, data.rows[0].messages[:-1]) == ids[:first]
    with pytest.raises(InputError, match="spells the special token"):
        encode_prompt(tokenizer(CHATML), "messages", [Message("user", "<s>")])


def test_a_text_that_begins_itself_is_asked_with_one_beginning() -> None:
    begins = tokenizer(begins=True)
    (begun, _), (plain, _) = (one(encode_conversations(begins, text(words), 99)) for words in ("<s>why so", "why so"))
    assert begun == plain
    for asked in ("<s>why ", "why "):
        assert encode_prompt(begins, "text", [Message("assistant", asked)]) == begun[: len("why ") + 1]


def test_a_template_and_what_splits_no_special_tokens_survive_a_folder(tmp_path: Path) -> None:
    for number, tokens in enumerate((tokenizer(CHATML), byte_tokenizer())):
        tokens.save(tmp_path / str(number))
        again = pretrained_tokenizer(str(tmp_path / str(number)), local_only=True)
        assert encode_conversations(again, rows_of(TALK), 99) == encode_conversations(tokens, rows_of(TALK), 99)


def test_a_row_is_shown_token_by_token() -> None:
    ids, weights = written("a\u202e", ("\x1b<|im_end|>", 0.5))
    row = EncodedRow(7, array("i", ids), array("f", weights), 3, 2)
    lines = list(show_row(tokenizer(), row))
    assert lines[0] == "row 7: 6 tokens, 2 of them trained"
    assert lines[-1] == "cut: 3 tokens at its end, 2 of them to be trained"
    assert [line.split()[2] for line in lines[1:-1]] == [".", ".", ".", ".", "0.5", "0.5"]
    assert lines[5].endswith(r"'\x1b'")
    assert lines[6].endswith("'<|im_end|>'")
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("tokens", "form", "example", "note"),
    [
        (tokenizer(CHATML), "messages", None, ""),
        (tokenizer("{{ strftime_now('%d %b') }}" + CHATML), "messages", None, "its chat template writes the date"),
        (tokenizer(CHATML, begins=True), "text", "a prompt", ""),
        (tokenizer(begins=True), "prompt and completion", "a prompt", ""),
        (byte_tokenizer(begins=True), "messages", "user: a prompt\nassistant: ", ""),
        (byte_tokenizer(begins=True), "prompt and completion", "a prompt", ""),
        (byte_tokenizer(), "text", "a prompt", "its tokenizer puts other special tokens around a text"),
    ],
)
def test_how_transformers_alone_asks_is_known(tokens: Tokenizer, form: Form, example: str | None, note: str) -> None:
    found = prompt_format(tokens, form)
    assert found.example == example
    assert found.note.startswith(note)
    assert bool(found.note) == bool(note)
    if example is not None and not note:
        asked = encode_prompt(tokens, form, (Message("user", "a prompt"),))
        assert tokens.base(example)["input_ids"] == asked
