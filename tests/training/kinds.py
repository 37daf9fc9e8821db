"""Rows of every task but conversations, and the runs on them: what a text says, how long it is, what its words are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon.config.schema import CLASSIFICATION, MULTI_LABEL, REGRESSION, TOKEN_CLASSIFICATION
from tests.training.runs import COLOURS, Runs, row

COUNT = 45


@dataclass(frozen=True)
class Kind:
    """A task and rows of it. found: how the line ends that tells why it was taken; empty: it has to be named."""

    task: str
    rows: Callable[[int], dict[str, Any]]
    about: str
    found: str = ""
    settings: tuple[str, ...] = ()
    name: str = ""

    def written(self, folder: Path) -> Runs:
        path = folder / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(self.rows(place))}\n" for place in range(COUNT)))
        return Runs(path, (*self.settings, *([] if self.found else [f"task={self.task}"])))


def number(place: int) -> dict[str, Any]:
    text, _ = row(place)
    return {"text": text, "label": len(text) / 8}


def label_set(place: int) -> dict[str, Any]:
    text, colour = row(place)
    return {"text": text, "labels": [colour, *["long"] * (len(text) > 26)] if place % 7 else []}


def tagged(place: int) -> dict[str, Any]:
    words = row(place)[0].split()
    tags = ["B-colour" if word in COLOURS else "O" for word in words[:-3]]
    return {"tokens": words, "tags": [*tags, "B-thing", "I-thing", "I-thing"]}


def pair(place: int) -> dict[str, Any]:
    text, colour = row(place)
    return {"text": COLOURS[place // 3 % 3], "about": text, "label": str(colour == COLOURS[place // 3 % 3])}


KINDS = [
    Kind(REGRESSION, number, "numbers from 2.25 to 4.125"),
    Kind(MULTI_LABEL, label_set, "4 labels, 1.29 of them a row", "labels are lists"),
    Kind(
        TOKEN_CLASSIFICATION,
        tagged,
        f"4 tags of {sum(len(tagged(place)['tags']) for place in range(COUNT))} words",
        "'tokens' and 'tags' are lists",
    ),
    Kind(CLASSIFICATION, pair, "2 classes", settings=("data.text_pair_column=about",), name="pairs"),
]
IDS = [kind.name or kind.task for kind in KINDS]
