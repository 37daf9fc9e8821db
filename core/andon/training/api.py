"""Training from Python: `andon.train` makes the run of `andon train`, and `andon.open_run` opens a run that is there.

    run = andon.train(data=rows, model="MODEL", workers=2, training={"epochs": 3})
    run.summary.eval["accuracy"], run.predict(["a text"])

What ends the command with a code other than 0 is an exception here.
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

from andon.config.load import FLAGS, load_config
from andon.config.schema import SFT, Config
from andon.console.exits import Exit
from andon.console.messages import say
from andon.console.problems import InputError, Problem, ProblemList, install_hint, shown
from andon.data.labels import text_fault
from andon.launch.context import is_rank
from andon.launch.fork_server import for_one_launch
from andon.run.folder import RunFolder, State, metrics_lines
from andon.run.ledger import LedgerError, read_ledger
from andon.run.summary import Summary, labelled, read_summary
from andon.training.existing import require_run, require_task
from andon.training.given import RowFiles
from andon.training.rows import TEXT_TASKS
from andon.training.start import RunOutcome, start
from andon_contracts.record import Broken
from andon_contracts.violation import Finding, Violation

if TYPE_CHECKING:
    from andon.training.inference import Answer, Predicted, TrainedRun

_SHORT = {flag.removeprefix("--").replace("-", "_"): key for key, flag in FLAGS.items()}
"""The arguments that stand for one key of the configuration, as the flags of the command line do."""
_ROWS = {"data.train": "data", "data.eval": "eval_data"}
"""The keys of the configuration that name rows, with the arguments that stand for them."""
_one_at_a_time = threading.Lock()


class RunError(RuntimeError):
    """A run that did not reach its end. `exit` says how (docs/exit-codes.md), `path` is its folder."""

    exit: Exit = Exit.CRASHED
    path: Path | None = None


class RankLost(RunError):
    """A rank died, could not be reached, or gave no answer in time; the message names it. The run can be resumed."""


class Preempted(RunError):
    """A signal ended the run at a step boundary, with a checkpoint, and its handler let this program go on."""


RunError.__module__ = RankLost.__module__ = Preempted.__module__ = "andon"


def train(
    data: Any = None,
    *,
    model: Any = None,
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
    """Train as `andon train` does with these options, and return what it left; without any, the embedded example.

    data, eval_data: the path of a file, or rows: mappings of columns to values (a list, any iterable, a
    `datasets.Dataset`), or a pandas frame. Such rows are kept in the run folder. data may be a list of paths too, each
    with a weight as in `{"path": "a.jsonl", "weight": 0.5}`, or without. model: a folder or hub id. workers: a
    number, or "auto". config: a YAML file, of which the other arguments override single keys. settings: any other
    section of the configuration as a mapping of its keys, as in `training={"epochs": 3}`, or `seed`; the sections
    `data` and `model` too can be given as mappings of their keys.

    Signals end the run as they end the command, at a step boundary with a checkpoint, and are then handed on to the
    program's own handlers: Ctrl-C becomes `KeyboardInterrupt`. In other threads than the main one it is the program
    that gets them.

    Raises `InputError` (a `ValueError`) with all that the caller got wrong, `Violation` for a broken contract,
    `RankLost`, `Preempted`, and `RunError` for any other error of a rank; RuntimeError while another run is trained in
    this process.
    """
    named = {"model": model, "eval_data": eval_data, "text_column": text_column, "label_column": label_column}
    named |= {"workers": workers, "backend": backend, "run_dir": run_dir, "resume": resume, "data": data}
    started = time.monotonic()
    if is_rank():
        what = "starts ranks, and this process is one; have torchrun start the command: torchrun ... -m andon train"
        raise InputError([Problem("andon.train", what)])
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("another run is trained in this process; one ends before the next begins")
    try:
        with _row_files() as files:
            flags, overrides = _options(named | settings, files)
            found = load_config(None if config is None else Path(config), overrides, flags)
            if found.run.backend != "inline" and multiprocessing.current_process().daemon:
                what = f"{found.run.backend} starts ranks, and a daemonic process may start none; take inline"
                raise InputError([Problem("run.backend", what)])
            written = {key: files.written[name] for key, name in _ROWS.items() if name in files.written}
            given = {key.removeprefix("data."): path for key, path in written.items()}
            with _preserved() if found.run.backend == "inline" else for_one_launch():
                ended = start(found, started, given=given)
    finally:
        _one_at_a_time.release()
    if ended.exit is not Exit.OK:
        _raise(ended)
    if ended.asked_by:  # it came when nothing was left to be cut short
        signal.raise_signal(ended.asked_by)
    return TrainingRun(ended.folder.path)


def open_run(
    path: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    checkpoint: str | int | None = None,
    device: str = "auto",
) -> TrainingRun:
    """The run that lies at `path`, by whatever it was trained, finished or not.

    model: the path of its base, if that has moved. checkpoint: `best`, `last` or a step; None loads the run's result.
    device: `cpu`, `cuda`, `cuda:N`, or `auto`, which takes a GPU if there is one.
    Raises `InputError` for no run.
    """
    folder = RunFolder(Path(path))
    if folder.state() in (State.EMPTY, State.FOREIGN):
        raise InputError([Problem(str(path), "holds no run of andon")])
    base, step = None if model is None else os.fspath(model), None if checkpoint is None else str(checkpoint)
    return TrainingRun(folder.path, base, step, device)


class TrainingRun:
    """A run in its folder `path`. Everything is read from there when it is asked for; the model is loaded once.

    What a run has only at its end (`summary`, `adapter`, scores, predictions) is an `InputError` before.
    """

    def __init__(
        self, path: Path, base: str | None = None, checkpoint: str | None = None, device: str = "auto"
    ) -> None:
        self.path = path.absolute()  # a program may change its folder
        self._base, self._checkpoint, self._device = base, checkpoint, device

    def __repr__(self) -> str:
        return f"andon.open_run({str(self.path)!r})"

    @property
    def summary(self) -> Summary:
        """What the run came to, as its summary.json has it; `eval` names the classes, as `andon eval` does."""
        found = read_summary(RunFolder(self.path).summary)
        return replace(found, eval=labelled(found.eval, found.labels))

    @property
    def adapter(self) -> Path:
        """The folder of the trained adapter, with its tokenizer; the whole model where there is none."""
        return require_run(self.path).adapter

    @property
    def history(self) -> Any:
        """A record of each step: step, epoch, loss, accuracy, grad_norm, lr, rows, seconds.

        A pandas frame where pandas is installed, else a list of dicts.
        """
        path, steps = RunFolder(self.path).metrics, []
        try:
            for line in metrics_lines(path):
                with suppress(ValueError, RecursionError):  # a line that no run has written
                    found = json.loads(line)
                    if isinstance(found, dict) and "loss" in found and "what" not in found:
                        steps.append(found)
        except OSError as error:
            raise InputError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error
        if importlib.util.find_spec("pandas") is None:
            return steps
        return importlib.import_module("pandas").DataFrame(steps)

    def evaluate(self, data: Any, *, text_column: str | None = None, label_column: str | None = None) -> dict[str, Any]:
        """The scores of labelled rows, as `andon eval` prints them. data: as for `train`; columns: as in the run.

        Raises `InputError` with all that is wrong with the rows.
        """
        folder = require_run(self.path)
        from andon.training.inference import evaluate_run, read_labelled

        with _row_files() as files:
            path = Path(files.path_of(data, "data"))
            rows = read_labelled(folder, path, text_column=text_column, label_column=label_column)
            with _preserved(threads=None):
                return labelled(evaluate_run(self._model, rows).as_dict(), rows.labels)

    def predict(self, texts: Iterable[str]) -> list[Predicted]:
        """What the model says of each text, in order: the likeliest label with its probability, or a number.

        Raises `InputError` for what is no text, and for a run of conversations, which answers (`generate`).
        """
        require_task(require_run(self.path), TEXT_TASKS, "generate")
        checked = _texts(texts)
        from andon.training.inference import predict

        with _preserved(threads=None):
            return list(predict(self._model, checked))

    def generate(self, prompts: Iterable[str], *, max_new_tokens: int = 256) -> list[Answer]:
        """The answer to each prompt, in order, as `andon generate` gives it: the likeliest token at each place.

        Raises `InputError` for what is no text, a prompt that leaves no room, and a run of a classifier.
        """
        require_task(require_run(self.path), (SFT,), "predict")
        checked = _texts(prompts)
        from andon.training.inference import answer

        with _preserved(threads=None):
            try:
                return list(answer(self._model, checked, max_new_tokens))
            finally:
                del self._model  # its adapter may be merged now, which would change later scores by rounding

    def verify(self) -> Verified:
        """What `andon verify` says of the run. Raises `InputError` where the falsifier is not installed."""
        found = entry_points(group="andon.commands", name="verify")
        try:
            command = next(iter(found)).load()
        except (StopIteration, ModuleNotFoundError):
            what = f"andon_falsify is not installed; {install_hint('falsify')}"
            raise InputError([Problem("andon verify", what)]) from None
        try:
            return Verified(*command.report([self.path]))
        except OSError as error:
            raise InputError([Problem(str(error.filename), f"cannot be read: {error.strerror}")]) from error

    @cached_property
    def _model(self) -> TrainedRun:
        from andon.training.inference import load_run

        return load_run(require_run(self.path), self._base, checkpoint=self._checkpoint, device=self._device)


@dataclass(frozen=True)
class Verified:
    """What `andon verify` says: its lines, and its exit code, 0 if all that could be judged holds."""

    lines: tuple[str, ...]
    exit: int

    @property
    def holds(self) -> bool:
        """Whether every claim that the ledger can decide holds."""
        return self.exit == 0

    def __str__(self) -> str:
        return "\n".join(self.lines)


def _options(named: Mapping[str, Any], files: RowFiles) -> tuple[dict[str, Any], list[str]]:
    """The flags and the `--set` of the command line that say the same; rows that are no file are written to `files`."""
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
    """Temporary files for rows that are no file. Errors inside name the arguments, not these files or the flags."""

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
    """Run with a fresh rank's torch settings and restore the caller's on exit, so that a run leaves no trace.

    These are the number of threads (None: the caller's), deterministic kernels, the default type and device of tensors,
    gradients, autocast, the random states of torch, numpy and Python, and the environment's variables.
    """
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
        if torch.get_default_device().type != "cpu":  # the context costs something at each call
            stack.enter_context(torch.device("cpu"))
        on_exit(random.setstate, random.getstate())
        on_exit(torch.set_rng_state, torch.get_rng_state())
        if torch.cuda.is_initialized():
            on_exit(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        if numpy is not None:
            on_exit(numpy.random.set_state, numpy.random.get_state())
        stack.enter_context(torch.inference_mode(mode=False))  # gradients are recorded, too
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _texts(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str):
        raise InputError([Problem("texts", f"must be a list of texts, is one text ({shown(texts)})")])
    found, problems = list(texts), ProblemList()
    for place, text in enumerate(found):
        fault = text_fault(text) if isinstance(text, str) else f"must be a string, is {shown(text)}"
        if fault is not None:
            problems.add(f"texts[{place}]", f"the text {fault}")
    if not found:
        problems.add("texts", "holds no texts")
    problems.raise_if_any()
    return found


def _raise(ended: RunOutcome) -> NoReturn:
    again = f"go on with: andon.train(..., run_dir={str(ended.folder.path)!r}, resume='auto')"
    if ended.exit is Exit.USAGE:
        raise InputError.of_text(ended.why)
    if ended.exit is Exit.VIOLATION:  # as it would have been raised in this process: the ledger has what a rank saw
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
