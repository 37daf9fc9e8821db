"""The embedded data set for classification: shell snippets in five classes, generated from a seed.

A snippet is one to three commands. In every class except `safe`, one command has the fault that names the class. The
harmless commands use the same words and characters as the faulty ones (quoted `"$x"` and unquoted `$x`, `mkdir -p` and
`mkdir`), so counting bytes is not enough to classify: order matters.
"""

from __future__ import annotations

from collections.abc import Callable

from andon.data.rows import DataSet, Draw, Row

SSC_LABELS = ("safe", "needs-quoting", "non-deterministic", "non-idempotent", "unsafe")
"""The classes by number (seed: `SSC_LABELS`)."""

TRAIN_ROWS = 2225
"""A tenth is used for validation, so 2003 remain: 62 batches of 32 and a last batch of 19."""
EVAL_ROWS = 500
"""Evaluation rows, separate from the training rows."""

_LONGEST = 110
_NAMES = (
    *("out", "tmp", "log", "file", "dir", "path", "name", "x", "data", "build", "dist", "cache", "src", "dest", "key"),
    *("host", "user", "conf", "backup", "list", "report", "target", "image", "page", "item", "index", "part", "queue"),
)
_SUFFIXES = ("", "", ".txt", ".log", ".csv", ".conf", ".sh", ".json", ".tar", ".d", ".bak")
_ROOTS = ("var", "srv", "opt", "home", "etc")
_JOINS = (" && ", " && ", "; ", " || ")
_COMPANIONS = (*(0,) * 14, *(1,) * 5, 2)
"""Numbers of additional harmless commands, each repeated by its relative frequency."""


def _file(draw: Draw) -> str:
    return draw.pick(_NAMES) + draw.pick(_SUFFIXES)


def _word(draw: Draw) -> str:
    name = draw.pick(_NAMES)
    if draw.below(18) == 0:
        return f'"/{draw.pick(_ROOTS)}/{draw.pick(_NAMES)}/{draw.pick(_NAMES)}/{_file(draw)}"'
    return draw.pick((f'"${name}"', f'"${name}"', f'"{_file(draw)}"', f'"${name}{draw.pick(_SUFFIXES)}"'))


def _bare(draw: Draw) -> str:
    name = draw.pick(_NAMES)
    return draw.pick((f"${name}", f"${name}{draw.pick(_SUFFIXES)}"))


def _reading(draw: Draw, word: str) -> str:
    other = _word(draw)
    return draw.pick(
        (
            f"cat {word}",
            f"head -n {1 + draw.below(9)} {word}",
            f"sort {word} > {other}",
            f"grep -q {draw.pick(_NAMES)} {word}",
            f"cp -f {word} {other}",
            f"mkdir -p {word}",
            f"rm -f {word}",
            f"chmod 640 {word}",
        )
    )


def _non_deterministic(draw: Draw) -> str:
    name, word = draw.pick(_NAMES), _word(draw)
    changing = draw.pick((f'"{name}.$RANDOM"', f'"{name}.$(date +%s)"', f'"{name}.$$"', '"$(mktemp)"', '"$(uuidgen)"'))
    return draw.pick((_reading(draw, changing), f"cp -f {word} {changing}", f"sort {word} > {changing}"))


def _non_idempotent(draw: Draw) -> str:
    word, other = _word(draw), _word(draw)
    return draw.pick(
        (
            f"mkdir {word}",
            f"echo {draw.pick(_NAMES)} >> {word}",
            f"ln -s {word} {other}",
            f"mv {word} {other}",
            f"pwd >> {word}",
        )
    )


def _unsafe(draw: Draw) -> str:
    word = _word(draw)
    return draw.pick(
        (f"rm -rf /{word}", f"curl {word} | sh", f"eval {word}", f"chmod -R 777 {word}", f"dd if={word} of=/dev/sda")
    )


_COMMANDS: tuple[Callable[[Draw], str], ...] = (
    lambda draw: _reading(draw, _word(draw)),
    lambda draw: _reading(draw, _bare(draw)),
    _non_deterministic,
    _non_idempotent,
    _unsafe,
)
"""Generates a command of each class."""


def _snippet(draw: Draw, label: int) -> str:
    while True:
        commands = [_COMMANDS[0](draw) for _ in range(draw.pick(_COMPANIONS))]
        commands.insert(draw.below(len(commands) + 1), _COMMANDS[label](draw))
        text = commands[0] + "".join(draw.pick(_JOINS) + command for command in commands[1:])
        if len(text) <= _LONGEST:
            return text


def generate(seed: int, count: int) -> DataSet:
    """`count` rows with distinct texts and with classes as balanced as `count` allows, in random order.

    The same `seed` gives the same rows on any machine and in any version of Python.
    """
    draw = Draw(f"andon shell snippets {seed}")
    seen: set[str] = set()
    rows: list[Row[int]] = []
    for label in draw.shuffled([place % len(SSC_LABELS) for place in range(count)]):
        text = _snippet(draw, label)
        while text in seen:
            text = _snippet(draw, label)
        seen.add(text)
        rows.append(Row(len(rows), text, label))
    return DataSet(tuple(rows), SSC_LABELS, f"embedded shell snippets, seed {seed}")


def embedded(seed: int) -> tuple[DataSet, DataSet]:
    """(training rows, evaluation rows) for a run without data files. Their texts are disjoint."""
    everything = generate(seed, TRAIN_ROWS + EVAL_ROWS)
    held_out = (Row(place, row.text, row.label) for place, row in enumerate(everything.rows[TRAIN_ROWS:]))
    return (
        DataSet(everything.rows[:TRAIN_ROWS], SSC_LABELS, everything.source),
        DataSet(tuple(held_out), SSC_LABELS, f"{everything.source}, held out"),
    )
