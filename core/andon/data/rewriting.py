"""The embedded data set for SFT: rewrite a word of distinct letters by a rule.

Answers have 3 to 11 letters, so rows have different lengths. Words are padded to one width, so the distance of a letter
from its copy is the same in every row. A randomly initialized model of two layers learns this in two hundred updates;
without padding it had not begun to learn after five hundred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from andon.data.conversations import Conversation, ConversationSet, Message
from andon.data.rows import Draw

TRAIN_ROWS = 3200
EVAL_ROWS = 400
"""Evaluation rows, separate from the training rows."""

RULES: Mapping[str, Callable[[str], str]] = {
    "copy": lambda word: word,
    "caps": str.upper,
    "next": lambda word: "".join(_LETTERS[(_LETTERS.index(letter) + 1) % len(_LETTERS)] for letter in word),
}
"""By name in the prompt: the function from the word to the answer."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LONGEST = 11


def generate(seed: int, count: int) -> ConversationSet:
    """`count` rows with distinct prompts, and with rules and word lengths as balanced as `count` allows.

    The same `seed` gives the same rows on any machine and in any version of Python. Distinct prompts limit `count` to
    a few hundred thousand.
    """
    draw = Draw(f"andon rewriting {seed}")
    lengths = [3 + place % (_LONGEST - 2) for place in range(count)]
    rules = [[*RULES][place // (_LONGEST - 2) % len(RULES)] for place in range(count)]
    seen: set[str] = set()
    rows: list[Conversation] = []
    for rule, length in draw.shuffled([*zip(rules, lengths, strict=True)]):
        while True:
            word = "".join(draw.shuffled(_LETTERS)[:length])
            prompt = f"{rule} {word:.<{_LONGEST}}: "
            if prompt not in seen:
                break
        seen.add(prompt)
        messages = (Message("user", prompt), Message("assistant", RULES[rule](word)))
        rows.append(Conversation(len(rows), messages, f"row {len(rows)}", rule))
    return ConversationSet(tuple(rows), f"embedded words to rewrite, seed {seed}", "prompt and completion")


def embedded(seed: int) -> tuple[ConversationSet, ConversationSet]:
    """(training rows, evaluation rows) for a run without data files. Their prompts are disjoint."""
    everything = generate(seed, TRAIN_ROWS + EVAL_ROWS)
    train = everything.subset(range(TRAIN_ROWS))
    held_out = tuple(
        Conversation(place, row.messages, f"row {place}", row.source)
        for place, row in enumerate(everything.rows[TRAIN_ROWS:])
    )
    return train, ConversationSet(held_out, f"{everything.source}, held out", everything.form)
