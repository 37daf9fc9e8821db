"""Training from Python: `andon.train` does the same run as `andon train`, and `andon.open_run` opens an existing run.

    run = andon.train(data=rows, model="MODEL", workers=2, training={"epochs": 3})
    run.summary.eval["accuracy"], run.predict(["a text"])

If the command would exit with a code other than 0, the function raises an exception.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from andon.config.load import FLAGS
from andon.config.schema import CAUSAL, Config
from andon.console.messages import Exit, InputError, Problem, ProblemList, install_hint, reading, say, shown
from andon.data.rows import text_fault
from andon.launch.context import is_rank
from andon.launch.fork_server import for_one_launch
from andon.run.folder import RunFolder, State, metrics_lines
from andon.run.ledger import LedgerError, read_ledger
from andon.run.summary import Summary, labelled, read_summary
from andon.training.existing import how_to_resume, require_run, require_task, settings_for
from andon.training.given import RowFiles
from andon.training.rows import TEXT_TASKS
from andon.training.start import RunOutcome, start
from andon_contracts.record import Broken
from andon_contracts.violation import Finding, Violation

if TYPE_CHECKING:
    from andon.training.inference import Answer, Predicted, TrainedRun

_SHORT = {flag.removeprefix("--").replace("-", "_"): key for key, flag in FLAGS.items()}
"""Arguments for a single configuration key, named like the command's flags."""
_ROWS = {"data.train": "data", "data.validation": "validation_data", "data.eval": "eval_data"}
"""Configuration keys of data files, with the arguments that set them."""
_one_at_a_time = threading.Lock()


class RunError(RuntimeError):
    """A run did not finish. exit: its exit code (docs/reliability.md). path: its folder."""

    exit: Exit = Exit.CRASHED
    path: Path | None = None


class RankLost(RunError):
    """A rank died, was unreachable, or missed a deadline; the message names it. The run can be resumed."""


class Preempted(RunError):
    """A signal ended the run at a step boundary with a checkpoint, and the program's signal handler returned."""


RunError.__module__ = RankLost.__module__ = Preempted.__module__ = "andon"


def train(
    data: Any = None,
    *,
    model: Any = None,
    validation_data: Any = None,
    eval_data: Any = None,
    text_column: str | None = None,
    label_column: str | None = None,
    workers: int | str | None = None,
    backend: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | None = None,
    config: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> TrainingRun:
    """Train as `andon train` does with these options, and return the run. Without data, train the embedded example.

    data, validation_data, eval_data: a file's path, or rows: mappings of columns to values (a list, any iterable, a
    `datasets.Dataset`), or a pandas frame. Such rows are copied into the run folder. data may also be a list of paths,
    with or without weights, as in `{"path": "a.jsonl", "weight": 0.5}`. model: a folder or hub id. workers: a number or
    "auto". config: a YAML file, whose keys the other arguments override. settings: other sections of the configuration
    as mappings of their keys, as in `training={"epochs": 3}`, or `seed`. `data` and `model` may be such mappings too.

    A signal ends the run at a step boundary with a checkpoint, as for the command, and is then raised again for the
    program's own handlers: Ctrl-C becomes `KeyboardInterrupt`. In threads other than the main one, only the program's
    handlers receive signals.

    Raises `InputError` (a `ValueError`) with all errors of the caller, `Violation` for a broken contract, `RankLost`,
    `Preempted`, `RunError` for any other error of a rank, and `RuntimeError` while this process trains another run.
    """
    named = {"model": model, "eval_data": eval_data, "text_column": text_column, "label_column": label_column}
    named |= {"workers": workers, "backend": backend, "run_dir": run_dir, "resume": resume, "data": data}
    named["validation_data"] = validation_data
    started = time.monotonic()
    if is_rank():
        what = "starts ranks, but torchrun started this process as a rank; run instead: torchrun ... -m andon train"
        raise InputError.at("andon.train", what)
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("another run is training in this process; wait until it ends")
    try:
        with _row_files() as files:
            flags, overrides = _options(named | settings, files)
            loaded = settings_for(None if config is None else Path(config), overrides, flags)
            if loaded.run.backend != "inline" and multiprocessing.current_process().daemon:
                what = f"{loaded.run.backend} starts processes, which a daemonic process may not; use inline"
                raise InputError.at("run.backend", what)
            keys = {key: files.written[name] for key, name in _ROWS.items() if name in files.written}
            row_files = {key.removeprefix("data."): path for key, path in keys.items()}
            with _preserved() if loaded.run.backend == "inline" else for_one_launch():
                ended = start(loaded, started, given=row_files)
    finally:
        _one_at_a_time.release()
    if ended.exit is not Exit.OK:
        _raise(ended)
    if ended.asked_by:  # the signal arrived when the run was already complete
        signal.raise_signal(ended.asked_by)
    return TrainingRun(ended.folder.path)


def open_run(
    path: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    checkpoint: str | int | None = None,
    device: str = "auto",
) -> TrainingRun:
    """The run in the folder `path`, finished or not, trained by the command or from Python.

    model: the path of its base, if that has moved. checkpoint: `best`, `last` or a step; None loads the run's result.
    device: `cpu`, `cuda`, `cuda:N`, or `auto`: a GPU if available. Raises `InputError` if the folder has no run.
    """
    folder = RunFolder(Path(path))
    if folder.state() in (State.EMPTY, State.FOREIGN):
        raise InputError.at(path, "holds no run of andon")
    base, step = None if model is None else os.fspath(model), None if checkpoint is None else str(checkpoint)
    return TrainingRun(folder.path, base, step, device)


class TrainingRun:
    """A run in its folder `path`. Attributes are read from the folder at each access; the model is loaded once.

    Before the run has finished, `summary` and `adapter` raise `InputError`; scores and predictions need a checkpoint.
    """

    def __init__(
        self, path: Path, base: str | None = None, checkpoint: str | None = None, device: str = "auto"
    ) -> None:
        self.path = path.absolute()  # the program may change its working directory
        self._base, self._checkpoint, self._device = base, checkpoint, device

    def __repr__(self) -> str:
        return f"andon.open_run({str(self.path)!r})"

    @property
    def summary(self) -> Summary:
        """The run's summary.json, with class names added to `eval` as by `andon eval`."""
        result = read_summary(RunFolder(self.path).summary)
        return replace(result, eval=labelled(result.eval, result.labels))

    @property
    def adapter(self) -> Path:
        """The folder with the trained adapter, or the whole model for kind 'none', and the tokenizer."""
        return require_run(self.path).adapter

    @property
    def history(self) -> Any:
        """A record of each step: step, epoch, loss, accuracy, grad_norm, lr, rows, seconds.

        A pandas frame if pandas is installed, else a list of dicts.
        """
        path, steps = RunFolder(self.path).metrics, []
        with reading(path):
            for line in metrics_lines(path):
                with suppress(ValueError, RecursionError):  # skip damaged lines
                    values = json.loads(line)
                    if isinstance(values, dict) and "loss" in values and "what" not in values:
                        steps.append(values)
        if importlib.util.find_spec("pandas") is None:
            return steps
        return importlib.import_module("pandas").DataFrame(steps)

    def evaluate(self, data: Any, *, text_column: str | None = None, label_column: str | None = None) -> dict[str, Any]:
        """Scores of labelled rows, as printed by `andon eval`. data: as for `train`. Columns default to the run's.

        Raises `InputError` with all problems of the rows.
        """
        folder = require_run(self.path, self._checkpoint)
        from andon.training.inference import read_labelled, scored

        with _row_files() as files:
            path = Path(files.path_of(data, "data"))
            own = self._checkpoint
            rows = read_labelled(folder, path, checkpoint=own, text_column=text_column, label_column=label_column)
            with _preserved(threads=None):
                return scored(self._model, rows)

    def predict(self, texts: Iterable[str]) -> list[Predicted]:
        """The prediction for each text, in order: a label, labels, a tag per word, or a number, by the run's task.

        Raises `InputError` for items that are not valid texts, and for a run of `sft` or `dpo`, which has `generate`.
        """
        require_task(require_run(self.path, self._checkpoint), TEXT_TASKS, "generate")
        checked = _texts(texts)
        from andon.training.inference import predict

        with _preserved(threads=None):
            return list(predict(self._model, checked))

    def generate(self, prompts: Iterable[str], *, max_new_tokens: int = 256) -> list[Answer]:
        """The answer to each prompt, in order, by greedy decoding as in `andon generate`.

        Raises `InputError` for items that are not valid texts, a prompt that leaves no room for an answer, and a run of
        another task than `sft` and `dpo`.
        """
        require_task(require_run(self.path), CAUSAL, "predict")
        checked = _texts(prompts)
        from andon.training.inference import answer

        with _preserved(threads=None):
            try:
                return list(answer(self._model, checked, max_new_tokens))
            finally:
                del self._model  # its adapter may be merged now, which changes later scores by rounding

    def verify(self) -> Verified:
        """The result of `andon verify` for the run. Raises `InputError` if andon_falsify is not installed."""
        commands = entry_points(group="andon.commands", name="verify")
        try:
            command = next(iter(commands)).load()
        except (StopIteration, ModuleNotFoundError):
            raise InputError.at("andon verify", f"andon_falsify is not installed; {install_hint('judge')}") from None
        try:
            return Verified(*command.report([self.path]))
        except OSError as error:
            raise InputError.at(error.filename, f"cannot be read: {error.strerror}") from error

    @cached_property
    def _model(self) -> TrainedRun:
        from andon.training.inference import load_run

        folder = require_run(self.path, self._checkpoint)
        return load_run(folder, self._base, checkpoint=self._checkpoint, device=self._device)


@dataclass(frozen=True)
class Verified:
    """The output lines of `andon verify`, and its exit code: 0 if every decidable claim holds."""

    lines: tuple[str, ...]
    exit: int

    @property
    def holds(self) -> bool:
        """Whether every claim that the ledger can decide is true."""
        return self.exit == 0

    def __str__(self) -> str:
        return "\n".join(self.lines)


def _options(named: Mapping[str, Any], files: RowFiles) -> tuple[dict[str, Any], list[str]]:
    flags, keys = dict[str, Any](), dict[str, Any]()
    for name, value in named.items():
        if isinstance(value, Mapping) and name not in _ROWS.values() - Config.model_fields.keys():
            keys |= {f"{name}.{key}": inner for key, inner in value.items()}
        elif name not in _SHORT:
            keys[name] = value
        elif value is not None:
            flags[_SHORT[name]] = value
    for key, name in _ROWS.items():
        rows = keys.pop(key, None) if flags.get(key) is None else flags[key]
        if rows is not None:
            flags[key] = files.files_of(rows, name) if key == "data.train" else files.path_of(rows, name)
    flags = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in flags.items()}
    problems, overrides = ProblemList(), []
    for key, value in keys.items():
        try:
            plain = os.fspath(value) if isinstance(value, os.PathLike) else value
            overrides.append(f"{key}={json.dumps(plain, ensure_ascii=False)}")
        except (TypeError, ValueError, RecursionError):
            problems.add(key, f"must be a plain value, is {shown(value)}")
    problems.raise_if_any()
    return flags, overrides


@contextmanager
def _row_files() -> Iterator[RowFiles]:
    """Context manager with temporary files for rows in memory. Errors inside name the arguments, not files or flags."""

    def argument(where: str) -> str:
        plain = where.removeprefix("--set ")
        return plain.removeprefix("--").replace("-", "_") if plain.startswith("--") else plain

    with tempfile.TemporaryDirectory(prefix="andon-rows-") as folder:
        files = RowFiles(Path(folder))
        try:
            yield files
        except InputError as error:
            problems = [Problem(files.named(argument(each.where)), files.named(each.what)) for each in error.problems]
            raise InputError(problems) from None


@contextmanager
def _preserved(*, threads: int | None = 1) -> Iterator[None]:
    """Context manager: run with a fresh rank's torch settings, random states and environment, and restore the caller's
    on exit. threads: their number (None: the caller's)."""
    import torch

    deterministic: Any = torch.utils.deterministic
    environment, numpy = dict(os.environ), sys.modules.get("numpy")
    with ExitStack() as stack:
        on_exit = stack.callback
        on_exit(os.environ.update, environment)
        on_exit(lambda: [os.environ.pop(name) for name in os.environ.keys() - environment.keys()])
        on_exit(setattr, deterministic, "fill_uninitialized_memory", deterministic.fill_uninitialized_memory)
        on_exit(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads or torch.get_num_threads())
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        on_exit(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warn_only)
        on_exit(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":  # only then, since the context slows down each call
            stack.enter_context(torch.device("cpu"))
        on_exit(random.setstate, random.getstate())
        on_exit(torch.set_rng_state, torch.get_rng_state())
        if torch.cuda.is_initialized():
            on_exit(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        if numpy is not None:
            on_exit(numpy.random.set_state, numpy.random.get_state())
        stack.enter_context(torch.inference_mode(mode=False))  # this also enables gradients
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _texts(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str):
        raise InputError.at("texts", f"must be a list of texts, is one text ({shown(texts)})")
    checked, problems = list(texts), ProblemList()
    for place, text in enumerate(checked):
        fault = text_fault(text) if isinstance(text, str) else f"must be a string, is {shown(text)}"
        if fault is not None:
            problems.add(f"texts[{place}]", f"the text {fault}")
    if not checked:
        problems.add("texts", "holds no texts")
    problems.raise_if_any()
    return checked


def _raise(ended: RunOutcome) -> NoReturn:
    again = how_to_resume(ended.folder, f"andon.train(..., run_dir={str(ended.folder.path)!r}, resume='auto')")
    if ended.exit is Exit.USAGE:
        raise InputError.of_text(ended.why)
    if ended.exit is Exit.VIOLATION:  # the ledger has the finding of the rank that raised it
        clause, step = ("", 0) if ended.report is None else (ended.report.clause, ended.report.step)
        finding = Finding(ended.why, step)
        with suppress(OSError, LedgerError):
            for record in read_ledger(ended.folder.ledger):
                if isinstance(record, Broken) and (record.clause, record.step) == (clause, step):
                    finding = Finding(record.seen, step, record.ranks, record.tensor, tuple(record.details.items()))
        raise Violation(ended.why, clause=clause, finding=finding)
    if ended.asked_by and ended.exit in (Exit.PREEMPTED, Exit.RANK_LOST):
        say(f"{'ended at a step boundary' if ended.exit is Exit.PREEMPTED else ended.why}; {again}")
        signal.raise_signal(ended.asked_by)
    if ended.exit is Exit.PREEMPTED:
        error: RunError = Preempted(f"ended at a step boundary; {again}")
    else:
        error = (RankLost if ended.exit in (Exit.RANK_LOST, Exit.RANK_SILENT) else RunError)(ended.why)
        if ended.report is not None:
            error.add_note(ended.report.message)
    error.exit, error.path = ended.exit, ended.folder.path
    raise error
