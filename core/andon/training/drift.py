"""How far a model that was written for others is from the run: both are asked the same, and what they say is compared.

The written one is loaded by transformers alone, as whoever gets it does. What is compared is what a user is told:
probabilities, numbers, and of a model that answers the logits along the run's own answer, and whether it is the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from andon.config.schema import CLASSIFICATION, MULTI_LABEL, REGRESSION, SFT, TOKEN_CLASSIFICATION
from andon.config.source import loading
from andon.console.problems import InputError
from andon.data.chat import encode_prompt
from andon.data.conversations import Conversation, ConversationSet
from andon.data.rows import Examples, Row
from andon.model.build import LOADERS, computing, without_adapter
from andon.model.causal import generate
from andon.tasks.sft import Asked
from andon.training.inference import TrainedRun, logits_of_texts
from andon.training.material import HEADS

EXTENTS = {"rows": (8, 4, 8), "full": (256, 64, 32)}
"""By the name of the check: the most rows that are compared, or the most prompts and tokens of each answer."""
_MOST_LOGITS = 1 << 27
"""That are kept of the run's answers, half a GiB of fp32; a large vocabulary has fewer prompts."""
_BATCH = 16
"""Texts of one pass of the written model."""
_MOST_DRIFT = 1e-3
"""Of a model that computes in fp32 and is written in it, in parts of the largest number: sums in another order are far
below."""


@dataclass(frozen=True)
class Drift:
    """How far what a written model says is from the run's own.

    asked: the questions. largest: the largest difference of one number. size: the run's largest number, 1 at least.
    changed: the number of labels or answers that differ. words: the sentence for all this.
    """

    asked: Questions
    largest: float
    size: float
    changed: int
    words: str

    def __str__(self) -> str:
        rows, total = len(self.asked), self.asked.total
        of = f"{total}" if rows == total else f"{rows} of {total}"
        return self.words.format(of=of, largest=f"{self.largest:.1e}", changed=self.changed, tokens=self.asked.tokens)

    @property
    def within_rounding(self) -> bool:
        """Whether sums in another order can be all that differs; not a number never is."""
        return self.largest <= _MOST_DRIFT * self.size


@dataclass(frozen=True)
class Said:
    """numbers: fp32 [n, k], what a model says. decided: what follows from it, one entry for each that may change."""

    numbers: torch.Tensor
    decided: Sequence[object]


@dataclass(frozen=True)
class Questions:
    """Rows that both models predict, or the ids of prompts that both answer, out of a run's `total` rows.

    tokens: the limit of an answer.
    """

    rows: Sequence[Row[Any]]
    prompts: Sequence[list[int]]
    total: int
    tokens: int

    def __len__(self) -> int:
        return len(self.rows) + len(self.prompts)


def questions_of(run: TrainedRun, data: Examples, check: str) -> Questions:
    """Rows in `data`, or its prompts, evenly spaced. check: how many, by its name in `EXTENTS`."""
    rows, prompts, tokens = EXTENTS[check]
    if isinstance(data, ConversationSet):
        vocabulary = int(without_adapter(run.model).get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        most = min(prompts, max(1, _MOST_LOGITS // (vocabulary * tokens)))
        asked = [_prompt(run, row, data) for row in _spaced(data.rows, most)]
        return Questions((), [ids for ids in asked if ids], len(data), tokens)
    return Questions(_spaced(data.rows, rows), (), len(data), tokens)


_Item = TypeVar("_Item")


def _spaced(items: Sequence[_Item], most: int) -> Sequence[_Item]:
    return [items[place * len(items) // most] for place in range(most)] if len(items) > most else items


def _prompt(run: TrainedRun, row: Conversation, data: ConversationSet) -> list[int]:
    """What is before the last answer; of a row of text its first half. Empty where the model has no room to answer."""
    text = data.form == "text"
    try:
        ids = encode_prompt(run.tokenizer, data.form, row.messages if text else row.messages[:-1])
    except InputError:  # a template that writes no conversation without its answer
        return []
    ids = ids[: -(-len(ids) // 2)] if text else ids
    return ids if len(ids) < run.config.model.max_length else []


def said_by_run(run: TrainedRun, asked: Questions) -> Said:
    """What the run's own model says."""
    task = run.config.task or CLASSIFICATION
    if task == SFT:
        stops = Asked.read(run.folder.adapter).stops
        answers = generate(run.model, asked.prompts, stops, [_room(run, asked, ids) for ids in asked.prompts])
        with computing(run.model, run.device):
            logits = _along(without_adapter(run.model), asked.prompts, answers)
        return Said(logits, list(map(tuple, answers)))
    found = [row for batch in _batches(asked) for row in logits_of_texts(run, *batch)]
    return _SAID[task](run, asked, found)


def said_by_written(
    run: TrainedRun, folder: Path, asked: Questions, before: Said, base: Path | str | None = None
) -> Said:
    """What the model in `folder` says, by transformers alone, or by transformers and peft for an adapter on `base`.

    before: what the run's own said.
    """
    import transformers

    task, place = run.config.task or CLASSIFICATION, str(folder)
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with loading(place, place):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(place, **local)
        loader = getattr(transformers, LOADERS[HEADS[task]])
        if base is None:
            model: Any = loader.from_pretrained(place, dtype="auto", **local)
        else:
            model = _with_peft(run, loader, folder, str(base), local)
    model.to(run.device).eval()
    with torch.no_grad():
        if task == SFT:
            answers = [_written_answer(model, ids, _room(run, asked, ids)) for ids in asked.prompts]
            return Said(_along(model, asked.prompts, before.decided), answers)  # type: ignore[arg-type]
        how = {"padding": True, "truncation": True, "return_tensors": "pt"}
        given = (tokenizer(*(part for part in batch if part is not None), **how) for batch in _batches(asked))
        found = [row for batch in given for row in model(**batch.to(run.device)).logits.float().cpu()]
        return _SAID[task](run, asked, found)


def _with_peft(run: TrainedRun, loader: Any, folder: Path, base: str, local: Mapping[str, Any]) -> Any:
    import transformers
    from peft import PeftModel

    named = folder / "classifier.json"
    config = transformers.AutoConfig.from_pretrained(named if named.is_file() else base, **local)
    dtype = run.config.model.dtype
    model = loader.from_pretrained(base, config=config, dtype=dtype, ignore_mismatched_sizes=True, **local)
    if run.config.task == SFT:
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        rows = max(run.tokenizer.ids_of(run.config.model.new_tokens), default=-1) + 1
        if rows > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(rows, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, folder)


def drift(run: TrainedRun, asked: Questions, before: Said, after: Said) -> Drift:
    """The difference of what was said to the same questions, of which there must be one at least."""
    ours, theirs = before.numbers, after.numbers
    return Drift(
        asked=asked,
        largest=float((ours - theirs).abs().max()),
        size=max(1.0, float(ours.abs().max())),
        changed=sum(one != other for one, other in zip(before.decided, after.decided, strict=True)),
        words=_WORDS[run.config.task or CLASSIFICATION],
    )


def _room(run: TrainedRun, asked: Questions, ids: Sequence[int]) -> int:
    return min(asked.tokens, run.config.model.max_length - len(ids))


def _along(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> torch.Tensor:
    """fp32 [tokens of all answers, vocabulary]: the logits by which each of these tokens is taken, or is not."""
    found = []
    with torch.no_grad():
        for ids, answer in zip(prompts, answers, strict=True):
            given = torch.tensor([[*ids, *answer[:-1]]], device=model.device)
            found.append(model(input_ids=given, use_cache=False).logits[0, len(ids) - 1 :].float().cpu())
    return torch.cat(found)


def _written_answer(model: Any, ids: list[int], most: int) -> tuple[int, ...]:
    given = torch.tensor([ids], device=model.device)
    found = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=most)
    return tuple(found[0, len(ids) :].tolist())


def _batches(asked: Questions) -> Iterator[tuple[list[str], list[str] | None]]:
    for first in range(0, len(asked.rows), _BATCH):
        rows = asked.rows[first : first + _BATCH]
        pairs = [row.pair for row in rows if row.pair is not None]
        yield [row.text for row in rows], pairs or None


def _classes(run: TrainedRun, asked: Questions, logits: Sequence[torch.Tensor]) -> Said:
    found = torch.stack([*logits]).softmax(dim=1)
    return Said(found, found.argmax(dim=1).tolist())


def _label_sets(run: TrainedRun, asked: Questions, logits: Sequence[torch.Tensor]) -> Said:
    found = torch.stack([*logits]).sigmoid()
    return Said(found, (found > 0.5).tolist())


def _tags(run: TrainedRun, asked: Questions, logits: Sequence[torch.Tensor]) -> Said:
    _, firsts = run.tokenizer.encode_words([row.text for row in asked.rows], run.config.model.max_length)
    parts = [row[[place for place in places if place >= 0]] for row, places in zip(logits, firsts, strict=True)]
    found = torch.cat(parts).softmax(dim=1)
    return Said(found, found.argmax(dim=1).tolist())


_SAID: Mapping[str, Callable[[TrainedRun, Questions, Sequence[torch.Tensor]], Said]] = {
    CLASSIFICATION: _classes,
    REGRESSION: lambda run, asked, logits: Said(torch.stack([*logits]), ()),
    MULTI_LABEL: _label_sets,
    TOKEN_CLASSIFICATION: _tags,
}
"""By task: turns the logits of each text into numbers to compare and decisions."""
_WORDS: Mapping[str, str] = {
    CLASSIFICATION: "on {of} evaluation rows the largest difference from a probability of the run is {largest}, and "
    "{changed} rows get another label",
    REGRESSION: "on {of} evaluation rows the largest difference from a number of the run is {largest}",
    MULTI_LABEL: "on {of} evaluation rows the largest difference from a probability of the run is {largest}, and "
    "{changed} rows get other labels",
    TOKEN_CLASSIFICATION: "on {of} evaluation rows the largest difference from a probability of the run, of a word's "
    "tag, is {largest}, and {changed} words get another tag",
    SFT: "on {of} evaluation prompts, answered with {tokens} tokens at most, the largest difference from a logit of "
    "the run is {largest}, and {changed} greedy answers change",
}
"""By the task's name."""
