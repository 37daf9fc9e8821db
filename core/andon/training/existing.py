"""Look up and check runs on disk, without torch and before any process starts, so that a wrong path fails at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from andon.config.load import SettingsError, by_dotted_key, differences, identity, load_config
from andon.config.schema import CLASSIFICATION, Config
from andon.config.source import is_there, require_file
from andon.console.messages import InputError, Problem, ProblemList, command_line, say
from andon.data.hub import at_hand, require_found
from andon.run.folder import RunFolder, State
from andon.run.ledger import LedgerError, read_ledger
from andon.run.summary import read_provenance
from andon.training.choices import automatic_keys, inherited, is_set, usual_values, value_of, with_values
from andon.training.rows import data_files, read_rows, task_of_run
from andon_contracts.record import Retraction, Start, Step


def require_run(path: Path, checkpoint: str | None = None) -> RunFolder:
    """The run folder at `path`. Raises `InputError` unless it has a trained adapter or a checkpoint is named."""
    folder = RunFolder(path)
    if not is_there(path):
        raise InputError.at(path, "no such run")
    if folder.state() in (State.EMPTY, State.FOREIGN):
        raise InputError.at(path, "holds no run of andon")
    if not folder.adapter.is_dir() and checkpoint is None:
        how = how_to_resume(folder)
        also = "; predict and eval can use its newest checkpoint: --checkpoint last" if how.startswith("res") else ""
        raise InputError.at(path, f"is not finished ({progress_text(folder)}); {how}{also}")
    return folder


def settings_for(path: Path | None, overrides: Sequence[str], flags: Mapping[str, object]) -> Config:
    """The configuration of a run to start or to check, as from `load_config`; its base and its data files exist.

    If something is wrong, the rows are read too, so that the `InputError` lists every problem at once. A resume looks
    for base and files later, since a finished run needs neither.
    """
    problems, wrong = ProblemList(limit=60), frozenset[str]()
    try:
        config = load_config(path, overrides, flags)
    except SettingsError as error:
        if error.usable is None:
            raise
        config, wrong = error.usable, error.sections
        with problems.collecting():
            raise
    if config.run.resume == "auto" and not problems:
        return config
    with problems.collecting():
        if config.model.base is not None:
            require_found(config.model.base, config.model.revision)
    for file in (files := data_files(config)):
        with problems.collecting():
            require_file(file)
    # Settings of the data say which rows to read, and the training files say of which task.
    known = len(config.data.files)
    held = [name for name in ("validation", "eval") if getattr(config.data, name) is not None]
    gone = [f"data.{name}" for name, file in zip(held, files[known:], strict=True) if not file.is_file()]
    if problems and not wrong & {"task", "data"} and known and all(file.is_file() for file in files[:known]):
        with problems.collecting():
            read_rows(with_values(config, dict.fromkeys(gone)))
    problems.raise_if_any()
    return config


def config_of(folder: RunFolder, overrides: Sequence[str] = (), flags: Mapping[str, object] | None = None) -> Config:
    """The configuration in `folder`, with overrides as in `load_config`. Raises `InputError` as that does, and if the
    file is a symbolic link, since the folder may be untrusted."""
    if folder.config.is_symlink():
        raise InputError.at(folder.config, "is a symbolic link; replace it with the file itself")
    return load_config(folder.config, overrides, flags)


def config_at_hand(
    folder: RunFolder, overrides: Sequence[str] = (), flags: Mapping[str, object] | None = None
) -> Config:
    """As `config_of`, with a base on this machine: nothing is downloaded, since the folder may be untrusted. Raises
    `InputError` for a base that is not on this machine."""
    config = config_of(folder, overrides, flags)
    if config.model.base is None:
        return config
    base = at_hand(config.model.base, config.model.revision)
    return with_values(config, {"model.base": base, "model.revision": None})


def progress_text(folder: RunFolder) -> str:
    """The progress in the ledger of `folder`: `after step 14 of 30`, or `before its first step`."""
    done = planned = 0
    with suppress(OSError, LedgerError):  # a resume reports what is wrong with the ledger
        for record in read_ledger(folder.ledger):
            if isinstance(record, Start):
                planned = record.plan.steps or 0
            elif isinstance(record, Step):
                done = max(done, record.step)
            elif isinstance(record, Retraction):
                done = min(done, record.step)
    of = f" of {planned}" if planned else ""
    return f"after step {done}{of}" if done else "before its first step"


def resume_command(folder: RunFolder) -> str:
    return command_line("andon", "train", folder.config, "--run-dir", folder.path, "--resume", "auto")


def how_to_resume(folder: RunFolder, command: str = "") -> str:
    how = "resume" if any(folder.checkpoints.glob("step-*")) else "there is no checkpoint yet; start again"
    return f"{how} with: {command or resume_command(folder)}"


LENGTH = ("training.epochs", "training.max_steps")
"""The settings of a run's length."""


def how_to_train_on(config: Config, folder: RunFolder, *, finished: bool) -> str:
    """How to train the weights of the run of `config` in `folder` for more epochs, to end a message about `LENGTH`."""
    option, key = ("--model", "") if config.adapter.kind == "none" else ("--set", "adapter.init=")
    first = "" if finished else "finish this run, then "
    return (
        f"; for more epochs {first}start a new run from its weights: {command_line(option, f'{key}{folder.adapter}')}"
    )


def holds_a_run(folder: RunFolder) -> InputError:
    """The error of a new run in a folder that holds one."""
    if folder.state() is State.FINISHED:
        return InputError.at(folder.path, "holds a finished run; name another folder")
    what = f"a run that is not finished ({progress_text(folder)})"
    return InputError.at(folder.path, f"holds {what}; add --resume auto, or name another folder")


def taken_over(config: Config, folder: RunFolder) -> str:
    """A line with the unset settings of `config` that a resume takes from the run in `folder`, unless a new run would
    choose the same; else empty."""
    usual = by_dotted_key(Config()) | usual_values(config, task_of_run(config))
    keys = [key for key in automatic_keys(config) if not (is_set(config, key) or key.startswith("run."))]
    was = by_dotted_key(as_begun(config, folder))
    listed = [f"{key}={was[key]}" for key in keys if was[key] != usual[key]]
    return f"resume: settings taken from the run: {', '.join(listed)}" if listed else ""


def as_begun(config: Config, folder: RunFolder) -> Config:
    """`config`; if it resumes the run in `folder`, unset settings take that run's values."""
    with suppress(InputError):  # a resume reports what is wrong with it
        if config.run.resume == "auto" and folder.begun():
            return inherited(config, config_of(folder))
    return config


def require_same_as_finished(config: Config, folder: RunFolder) -> None:
    """Raise `InputError` if `config` describes another run than the finished one in `folder`.

    It lists every setting that differs (identity, base, column names), or says that the data differ. The kind of
    device is ignored, since nothing is left to compute. Data files that no longer exist are not compared.
    """
    try:
        was = config_of(folder)
    except InputError:
        return  # without the run's configuration nothing can be compared
    changed = [each for each in differences(identity(was), identity(config)) if each[0] != "run.device_kind"]
    columns = [(name, getattr(was.data, name), getattr(config.data, name)) for name in ("text_column", "label_column")]
    changed += [(f"data.{name}", before, now) for name, before, now in columns if before != now]
    sources = ("model.base", "adapter.init", "model.revision")
    named = [(key, value_of(was, key), value_of(config, key)) for key in sources]
    changed += [each for each in named if not _same_source(*each[1:])][:1]
    problems = [
        Problem(key, f"was {before!r} in the finished run in {folder.path}, is {now!r}; name another folder{more}")
        for key, before, now in changed
        for more in [how_to_train_on(was, folder, finished=True) if key in LENGTH else ""]
    ]
    then, files = (
        [each.data.eval, each.data.validation, *(file.path for file in each.data.files)] for each in (was, config)
    )
    data, gone = _data_of(folder), any(now is not None and not is_there(Path(now)) for now in files)
    incomparable = data is None or (gone and len(then) == len(files) and all(map(_same_source, then, files)))
    if not problems and not incomparable and read_rows(config).digest != data:
        problems = [Problem("data", f"differs from the data of the finished run in {folder.path}; name another folder")]
    if problems:
        raise InputError(problems)


def _same_source(was: str | None, now: str | None) -> bool:
    return was == now or (was is not None and now is not None and was == str(Path(now).resolve()))


def same_data(folder: RunFolder, config: Config) -> bool:
    """Whether the data of `config` is that of the run in `folder`, or the folder has no run or no digest of data."""
    return not folder.begun() or _data_of(folder) in (read_rows(config).digest, None)


def require_task(folder: RunFolder, tasks: Collection[str], other: str) -> None:
    """Raise `InputError` unless the run's task is one of `tasks`. other: the command to use for other tasks."""
    task = config_of(folder).task or CLASSIFICATION
    if task not in tasks:
        raise InputError.at(folder.path, f"is a run of {task}; use andon {other}")


def newest_unfinished(config: Config, base: Path) -> RunFolder | None:
    """The most recently written unfinished run directly under `base` with the identity and data of `config`, or None.

    Folders without a run, or with an unreadable configuration or provenance, are skipped. Raises `InputError` for
    invalid data, and if no run matches, `config` names no data, and the newest unfinished run has data files.
    """
    folders = []
    for path in base.iterdir() if base.is_dir() else ():
        folder = RunFolder(path)
        try:
            if path.is_dir() and folder.begun() and folder.state() is State.UNFINISHED:
                written = folder.ledger.stat().st_mtime_ns if folder.ledger.exists() else 0
                folders.append(((written, path.name), folder))
        except InputError as error:
            say(f"resume: skipped {path}: {error.line}")
    newest = [folder for _, folder in sorted(folders, key=lambda each: each[0], reverse=True)]
    data = ""
    for folder in newest:
        if _identity_of(folder) != identity(as_begun(config, folder)):
            continue
        data = data or read_rows(config).digest
        if _data_of(folder) == data:
            return folder
    other = _identity_of(newest[0]) if newest and config.data.train is None else None
    if other is not None and not other["data.embedded"]:
        what = f"no data is named, but the newest unfinished run, {newest[0].path}, has data files; continue it with"
        raise InputError.at("--resume", f"{what}: {resume_command(newest[0])}; or leave out --resume")
    return None


def _identity_of(folder: RunFolder) -> dict[str, object] | None:
    try:
        return identity(config_of(folder))
    except InputError:
        return None


def _data_of(folder: RunFolder) -> str | None:
    try:
        return read_provenance(folder.provenance).digest("data")
    except InputError:
        return None
