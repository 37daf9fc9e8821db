"""What somebody else made is data: a run folder, a model's folder, a ledger and a configuration run and hide nothing.

Each test is an attack of SECURITY.md's list.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from andon.cli.plugins import said_by
from andon.config.source import require_model_folder
from andon.console.problems import InputError
from andon_contracts.record import SCHEMA_VERSION
from tests.cli.command import cli
from tests.training.runs import Runs, write_jsonl

EVIL = "open({!r}, 'w').write('run')\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in which every weight was trained, so that its model lies in its folder."""
    folder = tmp_path_factory.mktemp("whole")
    runs = Runs(write_jsonl(folder / "train.jsonl"))
    assert runs.train(folder / "run", "training.max_steps=2", "adapter.kind=none") == 0
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be tampered with; the rows that it was trained on lie beside it."""
    shutil.copy(whole / "train.jsonl", tmp_path / "train.jsonl")
    return Path(shutil.copytree(whole / "run", tmp_path / "run"))


def change(path: Path, **values: object) -> None:
    """Set these in a file of JSON."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_run_folder_runs_no_code(run: Path, tmp_path: Path) -> None:
    """`auto_map` names a class in a file of the folder; whoever answers yes to transformers would run it."""
    ran = tmp_path / "ran"
    (run / "adapter" / "evil.py").write_text(EVIL.format(str(ran)))
    named = {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"}
    change(run / "adapter" / "config.json", auto_map=named, model_type="of_nobody")
    ended = cli("eval", run, tmp_path / "train.jsonl", stdin=b"y\n" * 20)
    assert (ended.code, ended.out) == (2, [])
    assert not ran.exists()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _elsewhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def _deep(path: Path) -> None:
    path.write_text('{"a":' * 100_000)


ATTACKS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "labels are a pipe": ("labels.json", _fifo, "is no regular file"),
    "weights are a pipe": ("model.safetensors", _fifo, "is no regular file"),
    "weights are elsewhere": ("model.safetensors", _elsewhere, "is a link that leads out of the folder"),
    "settings without end": ("config.json", _deep, "recursion"),
    "a kernel of the hub": (
        "config.json",
        lambda path: change(path, _attn_implementation="someone/kernel"),
        "names code in _attn_implementation: 'someone/kernel'",
    ),
    "too many layers": ("config.json", lambda path: change(path, num_hidden_layers=10**9), "more than 1000"),
    "too many classes": ("config.json", lambda path: change(path, num_labels=3 * 10**8), "more than 1048576"),
    "layers in a list": ("config.json", lambda path: change(path, block_sizes=[10**9]), "more than 1000"),
    "a link to a folder": (
        "labels.json",
        lambda path: (path.parent / "additional_chat_templates").symlink_to("/etc"),
        "is no regular file",
    ),
    "labels that are none": ("labels.json", lambda path: change(path, labels=7), "cannot read the label names"),
    "weights that are none": ("model.safetensors", lambda path: path.write_bytes(b"\x80\x04}."), "cannot load"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_no_data_is_refused_in_words(run: Path, attack: str) -> None:
    """No command waits for a pipe, follows a link out, or ends in a traceback: 2, and which file it is."""
    name, do, said = ATTACKS[attack]
    do(run / "adapter" / name)
    ended = cli("eval", run, run.parent / "train.jsonl")
    assert (ended.code, ended.out) == (2, []), ended.said
    assert said in "\n".join(ended.said)
    assert not any("Traceback" in line for line in ended.said)


def test_an_index_names_no_file_outside(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "../../other.safetensors"}}))
    with pytest.raises(InputError, match=r"names weights outside of the folder: '../../other\.safetensors'"):
        require_model_folder(tmp_path, "model.base")


def test_a_cache_of_the_hub_is_a_model_folder(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1234").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    (snapshot / "notes.json").write_text("[1, 2")
    require_model_folder(snapshot, "model.base")


def test_a_report_asks_no_module_beside_the_user(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    for name in ("andon", "contextlib", "warnings"):
        (run / f"{name}.py").write_text(EVIL.format(str(ran)) + "print('checked 14 of 14 claims')\n")
    monkeypatch.chdir(run)
    said = said_by("verify", "--", ".")
    assert said is not None
    assert not ran.exists()
    assert said[1][0].startswith("replicas-agree v1: not applicable"), said


def test_a_process_of_ours_keeps_the_flags_and_the_path_of_its_parent(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text("import sys; print(sys.flags.optimize, sys.flags.utf8_mode, sys.path[0])")
    asking = (
        "from andon.launch.interpreter import module_command as made; import subprocess; subprocess.run(made('named'))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-O", "-X", "utf8", "-c", asking]
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "named.py").write_text("print('run')")
    done = subprocess.run(command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1", str(tmp_path)]


ESCAPES = "\x1b]0;title\x07\u202e"


def test_foreign_text_does_not_act_on_a_terminal(run: Path, tmp_path: Path) -> None:
    ledger = run / "ledger.jsonl"
    first = json.loads(ledger.read_text().splitlines()[0]) | {"run": f"r{ESCAPES}", "v": SCHEMA_VERSION}
    ledger.write_text(json.dumps(first, sort_keys=True, separators=(",", ":")) + "\n")
    config = tmp_path / "config.yaml"
    config.write_text('"a\\e]0;title\\a\\u202e": 1\n')
    shown, checked = cli("show", run), cli("check", config)
    assert (shown.code, checked.code) == (0, 2)
    for lines in (shown.out, checked.said):
        text = "\n".join(lines)
        assert "title" in text
        assert not any(mark in text for mark in "\x1b\x07\u202e")


@pytest.mark.parametrize(("command", "code"), [("show", 2), ("explain", 2), ("verify", 64)])
def test_a_pipe_in_the_place_of_a_ledger_is_not_waited_for(tmp_path: Path, command: str, code: int) -> None:
    folder = tmp_path / f"run{ESCAPES}".replace("/", "")
    folder.mkdir()
    os.mkfifo(folder / "ledger.jsonl")
    ended = cli(command, folder)
    assert ended.code == code
    said = "\n".join(ended.said)
    assert ("a pipe or a device" if command == "verify" else "it is not a regular file") in said
    assert not any(mark in said for mark in "\x1b\x07\u202e")


def test_a_ledger_of_a_thousand_million_ranks_is_read_at_once(tmp_path: Path) -> None:
    from tests.inspection.ledgers import start, step, write

    records = [start(world=10**9), step(1, (2, 0), world=10**9)]
    ended = cli("verify", write(tmp_path / "ledger.jsonl", records))
    assert ended.code in (1, 2)
    assert any("999999982 more" in line for line in ended.out), ended.out
