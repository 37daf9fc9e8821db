"""Exports a finished run's model: merged into its base, or the adapter alone.

The exported folder is loaded by transformers (and peft) alone and compared with the run on evaluation rows: by
probabilities or numbers, and for a causal model by the logits along the run's own answers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from andon.config.schema import CAUSAL, CLASSIFICATION, MULTI_LABEL, REGRESSION, TOKEN_CLASSIFICATION
from andon.config.source import is_there, loading
from andon.console.messages import InputError
from andon.data.chat import encode_prompt
from andon.data.conversations import ConversationSet
from andon.metrics.scores import Confusion, read_confusion
from andon.model.adapter import save_base
from andon.model.build import LOADERS, computing, facts_of, without_adapter
from andon.model.causal import generate
from andon.model.masks import padding_of
from andon.model.quantize import NONE
from andon.run.atomic import whole_folder
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerError, read_ledger
from andon.run.summary import Summary, read_summary
from andon.tasks.sft import GenerationSettings
from andon.training.existing import config_of, resume_command
from andon.training.inference import TrainedRun, load_run, logits_of_texts, rows_of
from andon.training.material import HEADS
from andon.training.outputs import Form, form_of, packing_note, write_card, write_model_files, write_tokenizer
from andon_contracts.record import Start

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes of an exported model, by name."""
EXTENTS = {"rows": (8, 4, 8), "full": (256, 64, 32)}
"""By name of the check: the most rows that are compared, or the most prompts and tokens of each answer."""
CHECKS = (*EXTENTS, "none")
_MOST_LOGITS = 1 << 27
"""Most logits of the run's answers in memory, half a GiB of fp32. A large vocabulary allows fewer prompts."""
_BATCH = 16
"""Texts in one forward pass."""
_MOST_DRIFT = 1e-3
"""Relative to the largest value, for a model in fp32. Sums in another order differ far less."""
NOT_MEASURED = "its drift was not measured: the run's rows are gone or have changed"
_NO_PROMPT = "its drift was not measured: no evaluation prompt leaves the model room to answer"
_WORDS: Mapping[str, str] = {
    CLASSIFICATION: "probability of the run is {largest}, and {changed} rows get another label",
    REGRESSION: "number of the run is {largest}",
    MULTI_LABEL: "probability of the run is {largest}, and {changed} rows get other labels",
    TOKEN_CLASSIFICATION: "probability of the run, of a word's tag, is {largest}, and {changed} words get another tag",
    **dict.fromkeys(CAUSAL, "logit of the run is {largest}, and {changed} greedy answers change"),
}


def require_place(target: Path) -> None:
    """Raise `InputError` unless a new folder can be created at `target`."""
    if is_there(target) or target.is_symlink():
        raise InputError.at(target, "already exists; name a new folder")
    if not target.absolute().parent.is_dir():
        raise InputError.at(target, f"folder {target.parent} does not exist")


def result_of(folder: RunFolder) -> tuple[Summary, int, Confusion | None]:
    """Summary, number of training rows and confusion matrix of the finished run in `folder`.

    Raises `InputError` for a run that is not finished or cannot be read.
    """
    summary = read_summary(folder.summary)
    if not summary.finished:
        raise InputError.at(folder.path, f"is not finished; resume it with: {resume_command(folder)}")
    try:
        first = next(iter(read_ledger(folder.ledger)), None)
    except (OSError, LedgerError) as error:
        raise InputError.at(folder.ledger, f"cannot be read: {error}") from error
    if not isinstance(first, Start) or first.plan.rows is None:
        raise InputError.at(folder.ledger, "its first line is not the start of a run")
    quoted = summary.eval.get("confusion")
    return summary, first.plan.rows, read_confusion(folder.confusion, quoted) if quoted is not None else None


def export_run(run: TrainedRun, target: Path, dtype: str | None = None, check: str = "rows") -> tuple[str, ...]:
    """Write the run's model atomically to a new folder, and compare it with the run as `check` requires.

    dtype: a key of `DTYPES`: merge the adapter into the base in fp32 and save that in this type, which needs no peft.
    None: save a peft adapter (with its base if that is the embedded one), or the whole model if every weight was
    trained. check: one of `CHECKS`.

    Returns lines to print; the first says how far outputs differ from the run's. Afterwards `run.model` is unusable.
    Raises `InputError` as `require_place` and `result_of` do, and `RuntimeError` if the folder gives other outputs.
    """
    require_place(target)
    result, config = result_of(run.folder), config_of(run.folder)
    generation = GenerationSettings.read(run.folder.adapter) if run.config.task in CAUSAL else None
    compared: tuple[Questions, Answers] | str = "it was not compared with the run (--check none)"
    if check != "none":
        questions = _questions_of(run, check)
        compared = questions if isinstance(questions, str) else (questions, _answers_of_run(run, questions))
    own_code, form, base = facts_of(run.model).own_code, form_of(config), run.config.model.base
    whole, how = form is Form.WHOLE, ""
    if dtype is not None and not whole:
        form = Form.MERGED
    exact = dtype in (None, "float32") and (config.model.dtype == "float32" or (whole and dtype is not None))
    packed = config.model.quantize
    exact = exact and packed == NONE
    with whole_folder(target) as path:
        loaded_on: Path | str | None = None
        if dtype is not None:
            side, source = padding_of(run.model, run.device).side, run
            if packed != NONE:
                step = None if run.step is None else str(run.step)
                source = load_run(run.folder, base, checkpoint=step, as_loaded=True)
            save_base(source.model, path, run.labels, merged=DTYPES[dtype])
            del source
            write_tokenizer(path, run.tokenizer, config, run.labels, generation, side)
        else:
            # Where peft looks for the base: a hub id, an absolute path, or a folder next to the adapter.
            reference = config.model.base or "base"
            if config.model.base is not None and Path(config.model.base).expanduser().is_absolute():
                reference = str(Path(str(base)).expanduser().resolve())
            write_model_files(path, run.model, config, run.tokenizer, run.labels, reference, generation)
            loaded_on = None if whole else base
            if form is Form.COMPLETE:
                loaded_on = path / reference
                save_base(run.model, loaded_on, run.labels)
        drift = compared if isinstance(compared, str) else _drift(run, path, *compared, loaded_on, exact=exact)
        if packed != NONE and not isinstance(compared, str):
            drift = f"{drift}; the run computes with its base in {packed}, and this comparison with the loaded one"
        if dtype is not None:
            how = f"its weights are in {dtype}{'' if whole else ', merged in float32'}; {drift}"
        of_checkpoint = ""
        if run.step is not None:
            of_checkpoint = (
                f"these are the weights of the run's checkpoint of step {run.step}; the scores, the digest of the "
                "trained weights and the command in this card are those of the run's result"
            )
        notes = (of_checkpoint, how, packing_note(config, form), own_code)
        card_lines = write_card(path, run.folder, config, *result, form, target.name, run.tokenizer, generation, notes)
        require_place(target)  # again, as measuring the drift takes minutes
        return drift, *card_lines


@dataclass(frozen=True)
class Questions:
    """Texts to predict, or prompts to answer, by both models, out of `total` evaluation rows.

    pairs: the second texts, if any. prompts: token ids of each, and the most tokens of its answer. tokens: the most
    tokens of all answers.
    """

    total: int
    tokens: int
    texts: Sequence[str] = ()
    pairs: Sequence[str] = ()
    prompts: Sequence[tuple[list[int], int]] = ()

    def batches(self) -> Iterator[tuple[Sequence[str], Sequence[str] | None]]:
        for part in (slice(first, first + _BATCH) for first in range(0, len(self.texts), _BATCH)):
            yield self.texts[part], self.pairs[part] or None


Answers = tuple[torch.Tensor, Sequence[object]]
"""Outputs, fp32 [n, k], and decisions: labels, tags, or each answer's tokens; empty for regression."""


def _questions_of(run: TrainedRun, check: str) -> Questions | str:
    run_rows = rows_of(run)
    if run_rows is None:
        return NOT_MEASURED
    data: Any = run_rows.evaluated_on
    (most, prompts, tokens), limit = EXTENTS[check], run.config.model.max_length
    if isinstance(data, ConversationSet):
        vocabulary = int(without_adapter(run.model).get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        most = min(prompts, max(1, _MOST_LOGITS // (vocabulary * tokens)))
    total = len(data)
    rows = [data.rows[place * total // most] for place in range(most)] if total > most else data.rows
    if not isinstance(data, ConversationSet):
        pairs = [row.pair for row in rows if row.pair is not None]
        return Questions(total, tokens, [row.text for row in rows], pairs) if rows else _NO_PROMPT
    answerable, text = [], data.form == "text"
    for row in rows:
        try:
            # A prompt is everything before the last answer, or the first half of a plain text.
            ids = encode_prompt(run.tokenizer, data.form, row.messages if text else row.messages[:-1])
        except InputError:  # the chat template renders no conversation without an answer
            continue
        ids = ids[: -(-len(ids) // 2)] if text else ids
        if ids and len(ids) < limit:
            answerable.append((ids, min(tokens, limit - len(ids))))
    return Questions(total, tokens, prompts=answerable) if answerable else _NO_PROMPT


def _answers_of_run(run: TrainedRun, questions: Questions) -> Answers:
    if run.config.task in CAUSAL:
        prompts, most = zip(*questions.prompts, strict=True)
        answers = generate(run.model, prompts, GenerationSettings.read(run.folder.adapter).stops, most)
        with computing(run.model, run.device):
            return _logits_along(without_adapter(run.model), questions, answers), list(map(tuple, answers))
    return _decided(run, questions, [row for batch in questions.batches() for row in logits_of_texts(run, *batch)[0]])


def _answers_of_written(
    run: TrainedRun, folder: Path, questions: Questions, before: Any, base: Path | str | None
) -> Answers:
    """Outputs of the model in `folder`, loaded by transformers alone, or by peft as an adapter on `base`. before: the
    run's own answers to prompts, along which logits are computed."""
    import transformers

    task, place = run.config.task or CLASSIFICATION, str(folder)
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with loading(place, place):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(place, **local)
        loader = getattr(transformers, LOADERS[HEADS[task]])
        if base is None:
            model: Any = loader.from_pretrained(place, dtype="auto", **local)
        else:
            from peft import PeftModel

            named, dtype = folder / "classifier.json", run.config.model.dtype
            config = transformers.AutoConfig.from_pretrained(named if named.is_file() else str(base), **local)
            model = loader.from_pretrained(str(base), config=config, dtype=dtype, ignore_mismatched_sizes=True, **local)
            if task in CAUSAL:
                model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
                rows = max(run.tokenizer.ids_of(run.config.model.new_tokens), default=-1) + 1
                if rows > model.get_input_embeddings().weight.shape[0]:
                    model.resize_token_embeddings(rows, mean_resizing=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = PeftModel.from_pretrained(model, folder)
    model.to(run.device).eval()
    with torch.no_grad():
        if task in CAUSAL:
            answers = []
            for ids, most in questions.prompts:
                prompt = torch.tensor([ids], device=model.device)
                output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=most)
                answers.append(tuple(output[0, len(ids) :].tolist()))
            return _logits_along(model, questions, before), answers
        logits = []
        for batch in questions.batches():
            parts = (part for part in batch if part is not None)
            encoded = tokenizer(*parts, padding=True, truncation=True, return_tensors="pt")
            logits += model(**encoded.to(run.device)).logits.float().cpu()
        return _decided(run, questions, logits)


def _logits_along(model: Any, questions: Questions, answers: Sequence[Sequence[int]]) -> torch.Tensor:
    logits = []
    with torch.no_grad():
        for (ids, _), answer in zip(questions.prompts, answers, strict=True):
            tokens = torch.tensor([[*ids, *answer[:-1]]], device=model.device)
            logits.append(model(input_ids=tokens, use_cache=False).logits[0, len(ids) - 1 :].float().cpu())
    return torch.cat(logits)


def _decided(run: TrainedRun, questions: Questions, logits: Sequence[torch.Tensor]) -> Answers:
    task = run.config.task or CLASSIFICATION
    if task == REGRESSION:
        return torch.stack([*logits]), ()
    if task == MULTI_LABEL:
        probabilities = torch.stack([*logits]).sigmoid()
        return probabilities, (probabilities > 0.5).tolist()
    if task == TOKEN_CLASSIFICATION:
        firsts = run.tokenizer.encode(questions.texts, run.config.model.max_length, words=True).firsts
        logits = [row[place] for row, places in zip(logits, firsts, strict=True) for place in places if place >= 0]
    probabilities = torch.stack([*logits]).softmax(dim=1)
    return probabilities, probabilities.argmax(dim=1).tolist()


def _drift(
    run: TrainedRun, path: Path, questions: Questions, before: Answers, base: Path | str | None, *, exact: bool
) -> str:
    """Describe how outputs of the folder at `path`, loaded by stock libraries, differ from the run's. Frees the run's
    model. Raises `RuntimeError` if an output is not finite or, if `exact` (both in fp32), they differ by more than
    rounding."""
    for parameter in run.model.parameters():
        parameter.data = parameter.data.new_empty(0)
    (numbers, decided), (written, after) = before, _answers_of_written(run, path, questions, before[1], base)
    largest, size = float((numbers - written).abs().max()), float(numbers.abs().max())
    count, task = len(questions.texts) + len(questions.prompts), run.config.task or CLASSIFICATION
    of = f"{questions.total}" if count == questions.total else f"{count} of {questions.total}"
    rows = f"prompts, answered with {questions.tokens} tokens at most," if task in CAUSAL else "rows"
    changed = sum(one != other for one, other in zip(decided, after, strict=True))
    words = _WORDS[task].format(largest=f"{largest:.1e}", changed=changed)
    sentence = f"on {of} evaluation {rows} the largest difference from a {words}"
    if not math.isfinite(largest) or (exact and not largest <= _MOST_DRIFT * max(1.0, size)):
        raise RuntimeError(f"the written model is not the run's: {sentence}")
    return sentence
