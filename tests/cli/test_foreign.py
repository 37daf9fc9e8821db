"""Files that somebody else made, read by each reader: a run folder, a model, a bundle, a configuration (SECURITY.md).

Each ends in words: no pipe is opened, no link followed, no code run, nothing fetched, no size believed, and text of
others stays inside the line that quotes it. `falsify.nemesis.fuzz` draws more of them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from andon.cli.app import guarded
from andon.cli.commands import init, plugin_output
from andon.cli.train import run_training
from andon.config.load import load_config
from andon.config.schema import Model
from andon.config.source import quiet_loading, require_model_folder
from andon.console.messages import Exit, InputError, say
from andon.inspection.difference import read_side
from andon.inspection.explain import explain
from andon.inspection.recorded import open_recorded
from andon.inspection.replay import replay_run
from andon.model.build import build_base
from andon.run.checkpoint import load_checkpoint, newest_valid, save_checkpoint
from andon.run.folder import RunFolder
from andon.run.ledger import read_ledger
from andon.run.summary import read_provenance, read_summary
from andon.training import trainer as history
from andon.training.existing import config_of, newest_unfinished, progress_text, require_task, resume_command
from andon.training.inference import load_run
from andon.training.trainer import MetricsWriter
from andon_contracts.act import Evidence, Scene, message, write_account, write_part
from andon_contracts.record import SCHEMA_VERSION, Broken, Step
from andon_contracts.untrusted import read_regular
from andon_contracts.violation import Finding, Violation
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.cli.falsify import internal
from andon_falsify.history import read_history
from andon_falsify.verdict import Outcome
from tests.cli.command import cli
from tests.inspection.ledgers import step, whole_run, write
from tests.model.tiny import TINY
from tests.training.runs import Runs


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert runs.train(folder, "training.max_steps=3", "training.checkpoint_every=1") == 0
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def _pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _link_to_pipe(path: Path) -> None:
    pipe = path.parents[3] / "pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    path.unlink()
    path.symlink_to(pipe)


def _elsewhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def _holes(path: Path) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(1 << 42)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "provenance": ("provenance.json", read_provenance),
    "summary": ("summary.json", read_summary),
    "ledger": ("ledger.jsonl", lambda path: open_recorded(path.parent)),
    "manifest": ("checkpoints/step-00000003/manifest.json", lambda path: load_checkpoint(path.parent)),
    "tensors": ("checkpoints/step-00000003/tensors.safetensors", lambda path: load_checkpoint(path.parent)),
}


@pytest.mark.parametrize("put", [_pipe, _link_to_pipe, _elsewhere, _holes], ids=lambda put: put.__name__.strip("_"))
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_plain_file_is_refused_at_once(run: Path, reader: str, put: Callable[[Path], None]) -> None:
    name, read = READERS[reader]
    put(run / name)
    with pytest.raises(ValueError, match=re.escape(str(run / name))):
        read(run / name)


@pytest.mark.parametrize("put", [_pipe, _link_to_pipe, _holes], ids=lambda put: put.__name__.strip("_"))
def test_what_only_says_where_a_run_is_waits_for_nothing(run: Path, put: Callable[[Path], None]) -> None:
    folder = RunFolder(run)
    put(folder.ledger)
    assert progress_text(folder) == "before its first step"


CONFIGURED: dict[str, Callable[[Path], object]] = {
    "report and diff": read_side,
    "predict and eval": lambda run: load_run(RunFolder(run)),
    "replay": lambda run: replay_run(run, "1", 1, "inline"),
    "verify": lambda run: read_run(run).settings(),
    "a command for one task": lambda run: require_task(RunFolder(run), (), "eval"),
}


@pytest.mark.parametrize("reader", CONFIGURED)
def test_a_link_in_the_place_of_the_configuration_is_followed_by_no_reader(run: Path, reader: str) -> None:
    config = RunFolder(run).config
    config.symlink_to(config.rename(run.parent / "elsewhere.yaml"))
    with pytest.raises(InputError, match=r"config\.yaml: is a symbolic link"):
        CONFIGURED[reader](run)


def test_a_line_without_end_ends_what_a_checker_reads(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    _holes(ledger)
    (line,) = read_history(ledger).lines()
    assert line.line == 1


def test_metrics_that_are_none_are_dropped_by_a_resume(tmp_path: Path) -> None:
    metrics, line = tmp_path / "metrics.jsonl", b'{"step": 1}\n'
    nested = b"[" * 100_000 + b"\n"
    metrics.write_bytes(line + b'{"step": Infinity}\n' + nested + b'{"step": 3}\n')
    with metrics.open("ab") as file:
        file.truncate(1 << 42)
    MetricsWriter(metrics, 2).close()
    assert metrics.read_bytes() == line


def test_manifests_that_are_pipes_are_not_waited_for(run: Path) -> None:
    manifest = run / "checkpoints" / "step-00000003" / "manifest.json"
    _link_to_pipe(manifest)
    (verdict,) = [each for each in verify([read_run(run)]) if each.claim == "heads-quoted"]
    assert verdict.outcome is Outcome.UNKNOWN
    assert str(manifest) in verdict.why


def test_a_regular_file_is_read_whole_and_a_larger_one_not_at_all(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"12345")
    link.symlink_to(path)
    assert read_regular(path, 5) == read_regular(link, 5, follow=True) == b"12345"
    with pytest.raises(OSError, match="its 5 bytes are more than the 4 allowed"):
        read_regular(path, 4)
    with pytest.raises(OSError, match="it is a link"):
        read_regular(link, 5)


def _bundle(folder: Path) -> Path:
    for rank in (0, 1):
        tensors = {"w": torch.full((2,), float(rank))}
        evidence = Evidence(folder, rank, 2, lambda: [5], lambda _, held=tensors: iter(held.items()))  # type: ignore[misc]
        assert write_part(folder / "4", "replicas-agree", evidence, {"step": 4}, "w") == ""
    assert write_account(folder / "4", "replicas-agree", Finding("they differ", 4, (1,), "w"), {}) == ""
    return folder / "4"


def test_a_bundle_reads_no_tensors_outside(tmp_path: Path) -> None:
    place = _bundle(tmp_path / "bundles")
    assert any("differs  w: 2 of 2 elements" in line for line in explain(place))
    for rank, said in (("0", "/../../../stolen-0"), ("1", "/../../../stolen-1")):
        part = place / "replicas-agree" / f"rank-{rank}.json"
        part.write_text(json.dumps(json.loads(part.read_text()) | {"rank": said}))
        (place / "replicas-agree" / f"rank-{rank}.safetensors").rename(tmp_path / f"stolen-{rank}.safetensors")
    (place / "replicas-agree" / "rank-").mkdir()
    lines = list(explain(place))
    assert "  differs  w" in lines  # and not in how many elements: no copy was read


ODD: dict[str, object] = {
    "threads": [7, {"frames": 8}, None],
    "ids": 9,
    "tensors": {"left out": 3},
    "digests": {"w": {"a": [1]}, "v": 2},
    "collectives": "",
    "rank": [[]],
}


@pytest.mark.parametrize("field", ODD)
def test_a_bundle_of_odd_values_is_shown_as_far_as_it_goes(tmp_path: Path, field: str) -> None:
    place = _bundle(tmp_path / "bundles")
    part = place / "replicas-agree" / "rank-1.json"
    part.write_text(json.dumps(json.loads(part.read_text()) | {field: ODD[field]}))
    account = place / "replicas-agree.json"
    odd = {"element": 3, "cause": [1], "versions": 4, "environment": {"devices": 5}}
    account.write_text(json.dumps(json.loads(account.read_text()) | odd))
    assert "  seen     they differ" in list(explain(place))


def test_parts_that_are_pipes_are_not_waited_for(tmp_path: Path) -> None:
    place = _bundle(tmp_path / "bundles")
    for name in ("rank-1.json", "rank-0.collectives.json"):
        _pipe(place / "replicas-agree" / name)
    assert "  rank-1   cannot be read: it is not a regular file" in list(explain(place))


def test_nothing_is_fetched_for_a_folder(run: Path) -> None:
    config = RunFolder(run).config
    config.write_text(config.read_text().replace("base: null", "base: nobody/has-this"))
    with pytest.raises(InputError, match=r"not a local folder and not in the hub's cache; fetch it first: hf download"):
        load_run(RunFolder(run))
    with pytest.raises(InputError, match="not in the hub's cache"):
        replay_run(run, "1", 1, "inline")


@pytest.mark.parametrize(
    "setting",
    [
        *("run.workers=1000000000", "model.num_hidden_layers=100000000", "model.hidden_size=4000000000"),
        *("adapter.r=10000000000", "training.micro_batches=1000000000000", "training.epochs=1000000000000000000000"),
    ],
)
def test_numbers_that_nobody_means_are_refused(setting: str) -> None:
    with pytest.raises(InputError, match=rf"{setting.partition('=')[0]}: must be at most"):
        load_config(None, ["training.batch_size=1000000000000", setting])


def test_an_embedded_model_larger_than_the_machine_is_refused() -> None:
    large, interface = Model(hidden_size=1 << 15, num_hidden_layers=900, intermediate_size=1 << 17), TINY.interface
    with pytest.raises(InputError, match=r"its sizes ask for [0-9.]+ GiB of weights"):
        build_base(large, interface, 0)
    assert build_base(Model(num_hidden_layers=1), interface, 0)


@pytest.mark.parametrize(
    ("state", "lacking", "said"),
    [
        ({"identity": None}, None, "does not name its run"),
        ({"progress": None}, None, "no usable progress"),
        ({"progress": {"step": 2}}, None, "no usable progress: it is of step 2"),
        ({"progress": {"step": 3, "wings": 2}}, None, "no usable progress"),
        *(({}, part, "is missing") for part in ("optimizer/exp_avg_sq", "optimizer/step", "weights")),
    ],
)
def test_a_checkpoint_sealed_anew_is_refused_in_words(
    runs: Runs, run: Path, state: dict[str, object], lacking: str | None, said: str
) -> None:
    last = load_checkpoint(run / "checkpoints" / "step-00000003")
    kept = {name: each for name, each in last.tensors.items() if lacking is None or not name.startswith(lacking)}
    assert (len(kept) < len(last.tensors)) == (lacking is not None)
    save_checkpoint(run / "checkpoints", 3, kept, last.state | state, last.head)
    RunFolder(run).summary.unlink()
    with pytest.raises(InputError, match=said):
        runs.train(run, "training.max_steps=3", "training.checkpoint_every=1", resume="auto")


def test_names_of_checkpoints_are_plain_digits(run: Path) -> None:
    for name in ("step-²", "step-0000000²", "step-٠٠٠٠٠٠٠٤", f"step-{'9' * 4000}"[:200]):
        shutil.copytree(run / "checkpoints" / "step-00000003", run / "checkpoints" / name)
    found, rejected = newest_valid(run / "checkpoints")
    assert (found is not None and found.step, rejected) == (3, [])
    assert "step-00000002" in str(replay_run(run, "3", 1, "inline").lines)


def test_a_step_beyond_the_plan_is_not_replayed(run: Path) -> None:
    ledger = RunFolder(run).ledger
    records = list(read_ledger(ledger))
    last = next(record for record in reversed(records) if isinstance(record, Step))
    ledger.unlink()
    write(ledger, [*records, replace(last, step=10**15)])
    with pytest.raises(InputError, match="has a step 1000000000000000, but the run has only 3"):
        replay_run(run, str(10**15), 1, "inline")


def test_a_key_twice_is_no_line(tmp_path: Path) -> None:
    ledger = write(tmp_path / "ledger.jsonl", whole_run())
    lines = ledger.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'{"', b'{"world":9,"', 1)
    ledger.write_bytes(b"".join(lines))
    assert any(getattr(line, "why", "").endswith("stands twice in one object") for line in read_history(ledger).lines())


EVIL = "open({!r}, 'w').write('run')\n"


@pytest.fixture(scope="module")
def model_of_run(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in which every weight was trained, so that its model lies in its folder."""
    folder = tmp_path_factory.mktemp("model") / "run"
    assert runs.train(folder, "training.max_steps=2", "adapter.kind=none") == 0
    return folder


@pytest.fixture
def model_run(model_of_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_of_run, tmp_path / "run"))


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_run_folder_runs_no_code(runs: Runs, model_run: Path, tmp_path: Path) -> None:
    """`auto_map` names a class in a file of the folder. transformers would run it after a yes on standard input."""
    ran = tmp_path / "ran"
    (model_run / "adapter" / "evil.py").write_text(EVIL.format(str(ran)))
    named = {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"}
    change(model_run / "adapter" / "config.json", auto_map=named, model_type="of_nobody")
    ended = cli("eval", model_run, runs.data, stdin=b"y\n" * 20)
    assert (ended.code, ended.out) == (2, [])
    assert not ran.exists()


ATTACKS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "labels are a pipe": ("labels.json", _pipe, "is not a regular file"),
    "weights are a pipe": ("model.safetensors", _pipe, "is not a regular file"),
    "weights are elsewhere": ("model.safetensors", _elsewhere, "is a link that leads out of the folder"),
    "settings are a list": ("config.json", lambda path: path.write_text("[]"), "must hold settings by name, is []"),
    "settings without end": ("config.json", lambda path: path.write_text('{"a":' * 100_000), "recursion"),
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
        "is not a regular file",
    ),
    "labels are a number": ("labels.json", lambda path: change(path, labels=7), "cannot read the label names"),
    "weights are a pickle": ("model.safetensors", lambda path: path.write_bytes(b"\x80\x04}."), "cannot load"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_no_data_is_refused_in_words(runs: Runs, model_run: Path, attack: str) -> None:
    name, do, said = ATTACKS[attack]
    do(model_run / "adapter" / name)
    ended = cli("eval", model_run, runs.data)
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


def test_a_report_asks_no_module_beside_the_user(
    model_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    for name in ("andon", "contextlib", "warnings"):
        (model_run / f"{name}.py").write_text(EVIL.format(str(ran)) + "print('checked 14 of 14 claims')\n")
    monkeypatch.chdir(model_run)
    said = plugin_output("verify", "--verbose", "--", ".")
    assert said is not None
    assert not ran.exists()
    assert said[1][0].startswith("replicas-agree v1: not applicable"), said


def test_a_process_of_ours_keeps_the_flags_and_the_path_of_its_parent(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text("import sys; print(sys.flags.optimize, sys.flags.utf8_mode, sys.path[0])")
    asking = (
        "from andon.console.messages import module_command as made; import subprocess; subprocess.run(made('named'))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-O", "-X", "utf8", "-c", asking]
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "named.py").write_text("print('run')")
    done = subprocess.run(command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1", str(tmp_path)]


ESCAPES = "\x1b]0;title\x07\u202e"


def test_foreign_text_does_not_act_on_a_terminal(model_run: Path, tmp_path: Path) -> None:
    ledger = model_run / "ledger.jsonl"
    first = json.loads(ledger.read_text().splitlines()[0]) | {"run": f"r{ESCAPES}", "v": SCHEMA_VERSION}
    ledger.write_text(json.dumps(first, sort_keys=True, separators=(",", ":")) + "\n")
    config = tmp_path / "config.yaml"
    config.write_text('"a\\e]0;title\\a\\u202e": 1\n')
    shown, checked = cli("show", model_run), cli("check", config)
    assert (shown.code, checked.code) == (0, 2)
    for lines in (shown.out, checked.said):
        text = "\n".join(lines)
        assert "title" in text
        assert not any(mark in text for mark in "\x1b\x07\u202e")


def test_a_checker_waits_for_no_pipe_in_the_place_of_a_ledger(run: Path) -> None:
    _pipe(RunFolder(run).ledger)
    with pytest.raises(OSError, match="is a pipe or a device, not a file"):
        read_run(run)


# Text of others in messages, and commands that can be pasted

FORGED = "done: 40 steps on 2 gloo workers"
TEXT = f"x\n{FORGED}\randon: {FORGED}\u2028{FORGED}\nandon: {FORGED}\n"
NAME = TEXT.replace("/", "")


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def _value(run: Path) -> object:
    _replace(run / "config.yaml", "kind: lora", f"kind: {json.dumps(TEXT)}")
    return config_of(RunFolder(run))


def _data(run: Path) -> object:
    path = run / f"{NAME}.jsonl"
    path.write_text("[]\n{}\n")
    return run_training(
        None, [f"data.train={json.dumps(str(path))}", "run.backend=inline"], {"run.dir": str(run / "new")}
    )


def _run_that_is_passed_over(run: Path) -> object:
    base = run.parent / "runs"
    named = Path(shutil.copytree(run, base / NAME))
    (named / "summary.json").unlink()
    (named / "ledger.jsonl").unlink()
    os.mkfifo(named / "ledger.jsonl")
    newest_unfinished(config_of(RunFolder(run)), base)


def _rejected_checkpoint(run: Path) -> object:
    named = run.rename(run.parent / NAME)
    (named / "summary.json").unlink()
    (named / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    run_training(named / "config.yaml", [], {"run.dir": str(named), "run.resume": "auto"})


def _violation_in_rows(run: Path) -> object:
    finding = Finding(TEXT, tensor=TEXT, details=(("x", TEXT),))
    for line in message("replicas-agree", finding, Scene(2, before=TEXT, also=(TEXT,), unwritten=TEXT)).split("\n"):
        say(line)


def _line_of_transformers(run: Path) -> object:
    with quiet_loading():
        logging.getLogger("transformers").handlers[0].stream = sys.stderr  # type: ignore[attr-defined]
        logging.getLogger("transformers.x").error(TEXT)


def _violation(run: Path) -> object:
    raise Violation.of("base-frozen", Finding(TEXT, tensor=TEXT))


CASES = (_value, _data, _run_that_is_passed_over, _rejected_checkpoint, _violation, _violation_in_rows)
CASES += (_line_of_transformers, lambda run: internal(RuntimeError(TEXT)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_no_text_of_others_makes_a_line(
    run: Path, case: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    guarded(lambda: case(run) and 0)
    text = "".join(capsys.readouterr())
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
def test_every_command_that_is_printed_can_be_pasted(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run, named = Path(name), "./-rf" if name == "-rf" else name
    run.mkdir()
    begun = ["andon", "train", f"{named}/config.yaml"]
    assert shlex.split(resume_command(RunFolder(run))) == [*begun, "--run-dir", named, "--resume", "auto"]
    write(
        run / "ledger.jsonl",
        [whole_run()[0], step(1, (2, 2)), Broken("finite", 2, (1,), "loss", "the loss is not finite")],
    )
    lines = list(explain(run))
    assert shlex.split(lines[-3])[1:] == ["andon", "show", named, "--step", "2"]
    assert shlex.split(lines[-1])[1:] == ["andon", "replay", named, "--steps", "1"]
    (repro,) = {each.repro for verdict in verify([read_run(run)]) for each in verdict.counterexamples}
    assert shlex.split(repro) == ["andon", "verify", named]
    init.callback(run)
    assert shlex.split(capsys.readouterr().out.splitlines()[-1])[1:] == begun
    (run / "ledger.jsonl").write_text("{}\n")
    with pytest.raises(InputError) as damaged:
        open_recorded(run)
    assert shlex.split(str(damaged.value).partition("to list all defects: ")[2]) == ["andon", "verify", named]
    with pytest.raises(InputError) as resumed:
        history.read_history(run / "ledger.jsonl", {})
    anew = str(resumed.value).partition("begin anew: ")[2]
    assert shlex.split(anew) == [*begun, "--run-dir", "ANOTHER_FOLDER"]
