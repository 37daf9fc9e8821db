"""Text of others stays inside the line that quotes it, whatever message it enters; commands can be pasted.

Each case puts a name or a text with line breaks into a file or an error, and has it refused.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from andon.cli.app import guarded
from andon.cli.setup import init
from andon.cli.train import run_training
from andon.config.load import load_config
from andon.config.source import quiet_loading
from andon.console.exits import Exit
from andon.console.messages import say
from andon.console.problems import InputError
from andon.inspection.explain import explain
from andon.inspection.recorded import open_recorded
from andon.run.folder import RunFolder
from andon.training.existing import config_of, go_on_with, newest_unfinished
from andon.training.history import read_history
from andon.training.inference import load_run
from andon_contracts.act import Scene, message
from andon_contracts.record import Broken
from andon_contracts.violation import Finding, Violation
from andon_contracts.watch.gradient_scale import scale_lines
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.cli.command import internal
from tests.cli.command import cli
from tests.inspection.ledgers import step, whole_run, write
from tests.training.runs import Runs, write_jsonl

FORGED = "done: 40 steps on 2 gloo workers"
TEXT = f"x\n{FORGED}\randon: {FORGED}\u2028{FORGED}\nandon: {FORGED}\n"
NAME = TEXT.replace("/", "")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("whole")
    runs = Runs(write_jsonl(folder / "train.jsonl"))
    assert runs.train(folder / "run", "training.max_steps=2", "training.checkpoint_every=1") == 0
    return folder / "run"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be tampered with."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def _set(path: Path, value: object, *keys: str) -> None:
    whole = inner = json.loads(path.read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(whole))


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def _file_of_an_adapter(run: Path) -> object:
    os.mkfifo(run / "adapter" / NAME)
    return load_run(RunFolder(run))


def _tensor_of_an_adapter(run: Path) -> object:
    file = run / "adapter" / "adapter_model.safetensors"
    save_file({TEXT + name: tensor for name, tensor in load_file(file).items()}, file)
    return load_run(RunFolder(run))


def _base(run: Path) -> object:
    _replace(run / "config.yaml", "base: null", f"base: {json.dumps(TEXT)}")
    return load_run(RunFolder(run))


def _key(run: Path) -> object:
    (run / "config.yaml").write_text(f"{json.dumps(TEXT)}: 1\nadapter:\n  {json.dumps(TEXT)}: 1\n")
    return config_of(RunFolder(run))


def _key_twice(run: Path) -> object:
    (run / "config.yaml").write_text(f"{json.dumps(TEXT)}: 1\n{json.dumps(TEXT)}: 1\n")
    return config_of(RunFolder(run))


def _value(run: Path) -> object:
    _replace(run / "config.yaml", "kind: lora", f"kind: {json.dumps(TEXT)}")
    return config_of(RunFolder(run))


def _configuration(run: Path) -> object:
    path = run / f"{NAME}.yaml"
    path.write_text("wings: 2\n")
    return load_config(path)


def _data(run: Path) -> object:
    path = run / f"{NAME}.jsonl"
    path.write_text("[]\n{}\n")
    return run_training(
        None, [f"data.train={json.dumps(str(path))}", "run.backend=inline"], {"run.dir": str(run / "new")}
    )


def _run_folder(run: Path) -> object:
    named = run.rename(run.parent / NAME)
    (named / "ledger.jsonl").write_text("{}\n")
    return open_recorded(named)


def _run_that_is_passed_over(run: Path) -> object:
    base = run.parent / "runs"
    named = Path(shutil.copytree(run, base / NAME))
    (named / "summary.json").unlink()
    (named / "ledger.jsonl").unlink()
    os.mkfifo(named / "ledger.jsonl")
    newest_unfinished(config_of(RunFolder(run)), base)
    raise InputError("only so that all cases end alike")


def _rejected_checkpoint(run: Path) -> object:
    named = run.rename(run.parent / NAME)
    (named / "summary.json").unlink()
    (named / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    run_training(named / "config.yaml", [], {"run.dir": str(named), "run.resume": "auto"})
    raise InputError("only so that all cases end alike")


def _error_of_a_library(run: Path) -> object:
    raise RuntimeError(TEXT)


def _violation(run: Path) -> object:
    raise Violation.of("base-frozen", Finding(TEXT, tensor=TEXT))


def _violation_in_rows(run: Path) -> object:
    finding = Finding(TEXT, tensor=TEXT, details=(("x", TEXT),))
    for line in message("replicas-agree", finding, Scene(2, before=TEXT, also=(TEXT,), unwritten=TEXT)).split("\n"):
        say(line)
    raise InputError("only so that all cases end alike")


def _line_of_transformers(run: Path) -> object:
    with quiet_loading():
        logging.getLogger("transformers").handlers[0].setStream(sys.stderr)  # type: ignore[attr-defined]
        logging.getLogger("transformers.x").error(TEXT)
    raise InputError("only so that all cases end alike")


def _suite(run: Path) -> object:
    internal(OSError(TEXT))
    raise InputError("only so that all cases end alike")


CASES: tuple[Callable[[Path], object], ...] = (
    *(_file_of_an_adapter, _tensor_of_an_adapter, _base, _key, _key_twice, _value, _configuration, _data, _run_folder),
    *(_run_that_is_passed_over, _rejected_checkpoint, _error_of_a_library, _violation, _violation_in_rows),
    *(_line_of_transformers, _suite),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_no_text_of_others_makes_a_line(
    run: Path, case: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:

    def work() -> int:
        case(run)
        return 0

    code = guarded(work)
    said = capsys.readouterr()
    assert code != 0
    text = said.err + said.out
    assert FORGED in text
    assert [line for line in text.splitlines() if line.removeprefix("andon: ").startswith(FORGED)] == []


def test_a_name_that_is_no_utf_8_is_refused_with_what_to_do() -> None:
    with pytest.raises(InputError, match=r"--run-dir: is not UTF-8 \('r\\udcff'\); .*rename the file or folder"):
        load_config(None, [], {"run.dir": os.fsdecode(b"r\xff")})


def test_a_folder_that_was_removed_is_no_place_to_start_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    ended = cli("show", tmp_path)
    assert ended.code == Exit.USAGE
    assert ended.said == ["andon: the current folder does not exist any more; change to another one"]


FOLDERS = ("my run", "x$(touch PWNED)", "it's", "-rf", "a;b", "`id`", 'say "so"', "plain")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_command_for_pasting_names_the_folder_in_one_word(name: str) -> None:
    folder = RunFolder(Path(name))
    path, config = ("./-rf", "./-rf/config.yaml") if name == "-rf" else (name, f"{name}/config.yaml")
    assert shlex.split(go_on_with(folder)) == ["andon", "train", config, "--run-dir", path, "--resume", "auto"]


@pytest.mark.parametrize("name", FOLDERS)
def test_every_command_that_is_printed_can_be_pasted(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run, named = Path(name), "./-rf" if name == "-rf" else name
    run.mkdir()
    write(
        run / "ledger.jsonl",
        [whole_run()[0], step(1, (2, 2)), Broken("finite", 2, (1,), "loss", "the loss is not finite")],
    )
    lines = list(explain(run))
    assert shlex.split(lines[-2])[1:] == ["andon", "show", named, "--step", "2"]
    assert shlex.split(lines[-1])[1:] == ["andon", "replay", named, "--steps", "1"]
    (repro,) = {each.repro for verdict in verify([read_run(run)]) for each in verdict.counterexamples}
    assert shlex.split(repro) == ["andon", "verify", named]
    init(run)
    assert shlex.split(capsys.readouterr().out.splitlines()[-1])[1:] == ["andon", "train", f"{named}/config.yaml"]
    (run / "ledger.jsonl").write_text("{}\n")
    with pytest.raises(InputError) as damaged:
        open_recorded(run)
    assert shlex.split(str(damaged.value).partition("all that is wrong: ")[2]) == ["andon", "verify", named]
    with pytest.raises(InputError) as resumed:
        read_history(run / "ledger.jsonl", {})
    said = shlex.split(str(resumed.value).partition("begin anew: ")[2])
    assert said == ["andon", "train", f"{named}/config.yaml", "--run-dir", "ANOTHER_FOLDER"]


def test_the_command_for_a_script_keeps_its_arguments() -> None:
    """What `andon watch` says would tell the scale: one word for --script, and in it each argument as it was."""
    account: Any = SimpleNamespace(account=SimpleNamespace(updates=0))
    command = ["my script.py", "--batch=4", "--accumulate", "2", "it's $(touch X)", "{}", "--$(x)batch=3"]
    (line,) = scale_lines([account], 2, command)
    words = shlex.split(line.partition(": andon falsify ")[2])
    assert words[0] == "--script"
    torchrun, arguments = words[1].split(" watch ", 1)
    assert torchrun == "torchrun --standalone --nproc-per-node {world} -m andon"
    assert shlex.split(arguments) == [
        *("my script.py", "--batch={local_batch}", "--accumulate", "{accumulation}", "it's $(touch X)", "{}"),
        "--$(x)batch={local_batch}",
    ]
    assert words[2:] == []
