"""Training from Python: the command's run with its bits and its checks, errors as exceptions, the caller left alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import andon
from andon.config.load import load_config
from andon.console.messages import Exit, InputError
from andon.data.readers import read
from andon.data.rows import DataSet
from andon.run.folder import RunFolder, State
from andon.run.summary import read_provenance
from andon.step.replica import Replica
from andon.training import api
from andon.training.given import write_rows
from andon.training.start import start
from tests.training.entries import AT, after_update
from tests.training.runs import STEPS, Runs, outcome, row, sections, summary

ROWS = [dict(zip(("text", "label"), row(number), strict=True)) for number in range(45)]  # what `runs.data` holds


def train(data: Any, folder: Path, **more: Any) -> andon.TrainingRun:
    """The small run from Python, on one worker in this process where nothing else is said."""
    return andon.train(data, run_dir=folder, **{"backend": "inline", "workers": 1} | sections() | more)


def test_rows_give_the_bits_of_the_command_on_their_file(runs: Runs, whole: Path, tmp_path: Path) -> None:
    for name, data, backend, workers in (("file", runs.data, "inline", 1), ("rows", iter(ROWS), "gloo", 2)):
        run = train(data, tmp_path / name, backend=backend, workers=workers)
        assert outcome(run.path) == outcome(whole)
        assert (run.summary.backend, run.summary.world_size) == (backend, 1 if workers == 1 else 2)
        mine, theirs = (read_provenance(RunFolder(path).provenance) for path in (run.path, whole))
        assert mine.digest("data") == theirs.digest("data")
    assert not RunFolder(tmp_path / "file").rows.exists()


class Frame:
    """What of a pandas frame is used: it yields the names of its columns, and makes records of itself."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self._records = records

    def __iter__(self) -> Iterator[str]:
        return iter(self._records[0])

    def to_dict(self, orient: str = "dict") -> Any:
        return self._records if orient == "records" else {}


class Table:
    """What of a `datasets.Dataset` is used: it yields its rows, and its `to_dict` knows no records."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self._records = records

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._records)

    def to_dict(self, batch_size: int | None = None) -> dict[str, Any]:
        return {}


def test_a_frame_with_one_label_missing_has_one_fault(tmp_path: Path) -> None:
    labels = [0.0, 2.0, float("nan"), 1.0]
    frame = Frame([{"text": f"t{place}", "label": label, "score": 0.5} for place, label in enumerate(labels)])
    write_rows(frame, tmp_path / "rows.jsonl", "data")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == [0, 2, None, 1]
    assert [type(row["label"]) for row in rows if row["label"] is not None] == [int] * 3
    assert {row["score"] for row in rows} == {0.5}
    with pytest.raises(InputError) as caught:
        read(DataSet, tmp_path / "rows.jsonl")
    assert str(caught.value) == f"{tmp_path / 'rows.jsonl'}:3: label is null"
    write_rows(Frame([{"label": 1.5}, {"label": float("nan")}]), tmp_path / "numbers.jsonl", "data")
    assert (tmp_path / "numbers.jsonl").read_text() == '{"label": 1.5}\n{"label": null}\n'


@pytest.mark.parametrize("form", [list, tuple, iter, Frame, Table], ids=lambda form: form.__name__)
def test_rows_come_in_many_forms(tmp_path: Path, form: Any) -> None:
    records = [
        {"text": "a", "label": np.int64(1), "score": float("nan"), 7: np.arange(2)},
        {"text": "b\u2028", "label": np.int64(0), "score": np.float32(0.5), 7: None},
    ]
    write_rows(form(records), tmp_path / "rows.jsonl", "data")
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().split("\n")[:-1]] == [
        {"text": "a", "label": 1, "score": None, "7": [0, 1]},
        {"text": "b\u2028", "label": 0, "score": 0.5, "7": None},
    ]


LABELLED = [*ROWS[:2], {"text": "x", "label": None}, {"text": "", "label": "red"}]
WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "rows": ({"data": LABELLED}, ["data[2]: label is null", "data[3]: text is empty"]),
    "evaluation rows": (
        {"data": ROWS, "eval_data": [{"text": "x", "label": "mauve"}]},
        ["eval_data[0]: label 'mauve' is unknown; there are 'blue', 'green', 'red'"],
    ),
    "no row": ({"data": []}, ["data: has no rows"]),
    "no mapping": ({"data": ["a", "b"]}, ["data[0]: must be a mapping of columns to values, is 'a'", "data[1]: "]),
    "no rows": ({"data": 7}, ["data: must be a path, or rows, each a mapping of columns; is 7"]),
    "splits": ({"eval_data": {"train": ROWS}, "data": ROWS}, ["eval_data: must be rows, as in [{'text': ..."]),
    "columns": ({"data": {"text": ["a"], "label": [0]}}, ["data.text: unknown key; ", "data.label: unknown key; "]),
    "a value": (
        {"data": [{"text": "a", "label": 1, "image": b"GIF"}]},
        ["data[0]: image is of type bytes, which JSON does not have; convert or drop it"],
    ),
    "one class": ({"data": ROWS[:1]}, ["data: all 1 rows have the label 'red'; a classifier needs two classes"]),
    "no file": ({"data": "none.csv"}, ["none.csv: no such file"]),
    "flags": (
        {"workers": 0, "backend": "glo", "resume": "yes"},
        ["workers: must be at least 1 (0)", "backend: must be", "resume: must be 'never' or 'auto' ('yes')"],
    ),
    "restarts in this process": (
        {"run": {"max_restarts": 2}, "backend": "inline"},
        ["run.max_restarts: needs ranks of their own, which inline has not"],
    ),
    "restarts": ({"max_restarts": 2}, ["max_restarts: unknown key; did you mean 'run.max_restarts'?"]),
    "settings": (
        {"training": {"epochs": 0, "batches": 3}, "seed": "x", "optimizer": {"lr": float("inf")}},
        ["training.epochs: must be at least 1 (0)", "training.batches: unknown key", "seed: must be an integer, is"],
    ),
    "no plain value": ({"training": {"epochs": object()}}, ["training.epochs: must be a plain value, is <object"]),
    "a configuration": ({"config": "none.yaml"}, ["none.yaml: no such file"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_the_caller_got_wrong_is_said_of_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, said = WRONG[case]
    with pytest.raises(andon.InputError) as found:
        andon.train(**arguments)
    lines = str(found.value).splitlines()
    assert [wanted for wanted in said if not any(line.startswith(wanted) for line in lines)] == [], lines
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_begin_leaves_none_of_its_rows(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(andon.InputError, match="model"):
        andon.train(ROWS, model=tmp_path / "model", run_dir=tmp_path / "run", backend="inline", workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_null_is_a_setting_and_not_its_absence(tmp_path: Path) -> None:
    settings = sections()
    settings["optimizer"] |= {"clip_norm": None}
    settings["data"] = {"train": ROWS, "validation_fraction": 0.2}
    settings["training"] |= {"max_steps": 1}
    run = andon.train(run_dir=tmp_path / "run", backend="inline", workers=1, model=settings.pop("model"), **settings)
    written = (run.path / "config.yaml").read_text()
    assert "clip_norm: null" in written
    assert "validation_fraction: 0.2" in written
    assert "hidden_size: 16" in written


@contextmanager
def planted(entry: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "start", partial(start, entry=f"tests.training.entries:{entry}"))
        yield


def test_a_lost_rank_is_named_and_the_run_goes_on_by_its_rows(whole: Path, tmp_path: Path) -> None:
    with planted("kill_rank"), pytest.raises(andon.RankLost, match="rank 1 of 2 was killed") as lost:
        train(ROWS, tmp_path / "python", backend="gloo", workers=2)
    assert (lost.value.exit, lost.value.path) == (Exit.RANK_LOST, tmp_path / "python")
    command = shutil.copytree(tmp_path / "python", tmp_path / "command")
    kept = sorted((tmp_path / "python" / "rows").iterdir())
    with pytest.raises(andon.InputError, match="a resumed run must keep this setting"):
        train(ROWS[:-3], tmp_path / "python", resume="auto")
    assert sorted((tmp_path / "python" / "rows").iterdir()) == kept
    assert outcome(train(ROWS, tmp_path / "python", resume="auto").path) == outcome(whole)
    more = ["run.resume=auto", "run.backend=inline", f"run.dir={command}"]
    again = api.start(load_config(command / "config.yaml", more), 0.0)
    assert again.exit is Exit.OK
    assert outcome(tmp_path / "command") == outcome(whole)
    finished = train(ROWS, tmp_path / "python", resume="auto")
    assert finished.verify().holds
    with pytest.raises(andon.InputError, match="differs from the data of the finished run"):
        train(ROWS[:-3], tmp_path / "python", resume="auto")


def test_a_violation_of_a_rank_is_raised_here(tmp_path: Path) -> None:
    with planted("flip_weight"), pytest.raises(andon.Violation, match="replicas-agree broken") as found:
        train(ROWS, tmp_path / "run", backend="gloo", workers=2)
    assert (found.value.clause, found.value.step) == ("replicas-agree", AT)
    assert found.value.finding.seen in str(found.value)


def signalled(monkeypatch: pytest.MonkeyPatch, signum: int, times: int = 1, step: int = AT) -> None:
    """This process gets the signal in its update `step`, so many times, and not again when that is repeated."""
    after_update(monkeypatch, step, lambda replica: [os.kill(os.getpid(), signum) for _ in range(times)])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As in a program: a shell lets what it starts in the background ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_at_a_step_boundary_and_is_then_raised(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same call goes on, though it names no folder: it takes the one under runs/ that began with the same rows."""
    monkeypatch.chdir(tmp_path)
    signalled(monkeypatch, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        andon.train(ROWS, backend="inline", workers=1, **sections())
    (begun,) = Path("runs").iterdir()
    assert "ended at a step boundary; resume with: andon.train(..., run_dir=" in capsys.readouterr().err
    assert RunFolder(begun).state() is State.UNFINISHED
    # Ranks agree on a wish to end at the begin of an update, so that the next one is the last.
    assert (begun / "checkpoints" / f"step-{AT + 1:08d}").is_dir()
    assert len(steps(andon.open_run(begun))) == AT + 1
    run = andon.train(ROWS, backend="inline", workers=1, resume="auto", **sections())
    assert (run.path, outcome(run.path)) == (begun.absolute(), outcome(whole))


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("step", "left"), [(AT, "resume with"), (2, "there is no checkpoint yet; start again with")])
def test_a_second_interrupt_ends_at_once_and_is_raised_too(
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: int,
    left: str,
) -> None:
    signalled(monkeypatch, signal.SIGINT, times=2, step=step)
    with pytest.raises(KeyboardInterrupt):
        train(ROWS, tmp_path / "run")
    assert f"stopped at once by a second SIGINT; {left}" in capsys.readouterr().err
    assert outcome(train(ROWS, tmp_path / "run", resume="auto").path) == outcome(whole)


def test_another_signal_reaches_the_program_s_own_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, bool]] = []

    def hear(signum: int, frame: FrameType | None) -> None:
        heard.append((signum, (tmp_path / "run" / "summary.json").exists()))

    before = signal.signal(signal.SIGUSR1, hear)
    try:
        signalled(monkeypatch, signal.SIGUSR1)
        with pytest.raises(andon.Preempted, match="ended at a step boundary; resume with") as ended:
            train(ROWS, tmp_path / "run")
        assert signal.getsignal(signal.SIGUSR1) is hear
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [(signal.SIGUSR1, True)]
    assert ended.value.exit is Exit.PREEMPTED


def test_the_caller_s_settings_change_no_bit_and_are_found_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model draws from generators of the process, as one of somebody else's may."""
    update = Replica.apply

    def apply(replica: Replica) -> None:
        update(replica)
        assert min(torch.rand(()).item(), random.random(), np.random.random()) >= 0.0

    monkeypatch.setattr(Replica, "apply", apply)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(mode=False)
    wanted: tuple[float, ...] = ()
    for _ in range(2):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        wanted = wanted or (torch.rand(()).item(), random.random(), np.random.random())
    environment, folder = dict(os.environ), Path.cwd()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        run = train(ROWS, tmp_path / "run")
        scores = run.evaluate(ROWS)
        told = run.predict([ROWS[0]["text"]])
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_default_device().type == "meta"
    assert outcome(run.path) == outcome(whole)
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (2, torch.float64)
    assert not torch.are_deterministic_algorithms_enabled()
    assert (torch.rand(()).item(), random.random(), np.random.random()) == wanted
    assert (dict(os.environ), Path.cwd()) == (environment, folder)
    plain = andon.open_run(whole)
    assert (plain.evaluate(ROWS), plain.predict([ROWS[0]["text"]])) == (scores, told)


def steps(run: andon.TrainingRun) -> list[dict[str, Any]]:
    found: Any = run.history
    return list(found if isinstance(found, list) else found.to_dict(orient="records"))


def test_the_history_is_a_frame_where_pandas_is(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = steps(andon.open_run(whole))
    pandas = types.ModuleType("pandas")
    pandas.__spec__ = ModuleSpec("pandas", None)
    monkeypatch.setattr(pandas, "DataFrame", Frame, raising=False)
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    frame = andon.open_run(whole).history
    assert isinstance(frame, Frame)
    assert frame.to_dict(orient="records") == records


def test_what_a_run_left_is_found_again(runs: Runs, whole: Path) -> None:
    run = andon.open_run(str(whole))
    assert run.summary.weights_digest == summary(whole)["weights_digest"]
    assert [record["step"] for record in steps(run)] == list(range(1, STEPS + 1))
    assert steps(run)[-1]["loss"] == run.summary.final_loss.value
    assert run.evaluate(runs.data) == run.evaluate(ROWS)
    assert run.evaluate(ROWS)["rows"] == len(ROWS)
    assert run.adapter == whole / "adapter"
    assert [each.text for each in run.predict(iter(["a red thing", "b"]))] == ["a red thing", "b"]
    assert str(run.verify()).splitlines()[-1].startswith("checked ")
    assert run.verify().holds
    with pytest.raises(andon.InputError, match=r"texts\[1\]: the text is empty"):
        run.predict(["a", ""])
    with pytest.raises(andon.InputError, match="must be a list of texts, is one text"):
        run.predict("a red thing")
    with pytest.raises(andon.InputError, match=r"data\[0\]: label 'mauve' is unknown"):
        run.evaluate([{"text": "a", "label": "mauve"}])
    with pytest.raises(andon.InputError, match="holds no run of andon"):
        andon.open_run(whole / "none")


def test_verify_says_what_is_broken(tmp_path: Path) -> None:
    run = train(ROWS, tmp_path / "run")
    ledger = RunFolder(run.path).ledger
    ledger.write_bytes(ledger.read_bytes().replace(b'"kind":"step"', b'"kind":"stop"', 1))
    found = run.verify()
    assert (found.exit, found.holds) == (1, False)
    assert "chain-intact v1: falsified" in str(found)


def test_where_processes_may_not_be_started_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # ranks would start ranks
    with pytest.raises(andon.InputError, match="torchrun started this process as a rank; run instead"):
        andon.train()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(andon.InputError, match="a daemonic process"):
        andon.train()


def test_a_thread_can_train_but_not_two_at_once(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[BaseException] = []
    begin = api.start

    def meanwhile(*arguments: Any, **more: Any) -> Any:
        with pytest.raises(RuntimeError, match="another run is training in this process") as error:
            andon.train()
        refused.append(error.value)
        return begin(*arguments, **more)

    monkeypatch.setattr(api, "start", meanwhile)
    ran: list[andon.TrainingRun] = []
    arguments: Mapping[str, Any] = {"backend": "gloo", "workers": 2}
    thread = threading.Thread(target=lambda: ran.append(train(ROWS, tmp_path / "run", **arguments)))
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert outcome(ran[0].path) == outcome(whole)
