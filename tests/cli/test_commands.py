"""The commands on good input. Most run in this process; start-up, torchrun, pipes and signals need a real one."""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import andon as andon_package
from andon.cli.commands import app
from andon.config.load import load_config
from andon.console.messages import InputError, moves_cursor, say, write
from andon.data.formats import encoded
from andon.metrics.scores import read_confusion
from andon.training.preview import describe
from andon.training.trainer import ProgressView
from tests.cli.command import PATIENCE_S, andon, cli, tree
from tests.training.runs import SMALL, Runs, outcome, summary, write_csv, write_jsonl

SETS = [part for each in SMALL for part in ("--set", each)]


def test_train_as_a_user_does(tmp_path: Path) -> None:
    """Neither the command nor its ranks import a module of the current folder, as somebody else's `torch.py`."""
    beside, ran = tmp_path / "beside", tmp_path / "ran"
    beside.mkdir()
    for name in ("torch", "signal", "transformers"):
        (beside / f"{name}.py").write_text(f"open({str(ran)!r}, 'w').write('run')\n")
    data, held = write_csv(tmp_path / "train.csv", range(30)), write_csv(tmp_path / "test.csv", range(30, 43))
    flags = ("--data", data, "--eval-data", held, "--text-column", "sentence", "--label-column", "colour")
    flags += ("--json", "--set", "run.log_every=2")
    folder = tmp_path / "run"
    ended = andon("train", *SETS, *flags, "--run-dir", folder, "--workers", "2", "--backend", "gloo", folder=beside)
    assert ended.code == 0, ended.said
    assert not ran.exists()
    assert [line for line in ended.said if not line.startswith("andon: ")] == []
    columns = ("data.text_column=sentence", "data.label_column=colour", f"data.eval={held}")
    assert Runs(data).train(tmp_path / "here", *columns) == 0
    assert outcome(folder) == outcome(tmp_path / "here")
    told = [json.loads(line) for line in ended.out]
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert told[-1] == {"what": "end", "exit": 0, "run": str(folder)}
    last = summary(folder)["steps"]
    assert told[:-1] == [line for line in written if "what" in line or line["step"] % 2 == 0 or line["step"] == last]


@pytest.mark.parametrize(("flag", "lines"), [("--quiet", 0), ("--json", 3)])
def test_a_quiet_run_says_no_progress(runs: Runs, tmp_path: Path, flag: str, lines: int) -> None:
    sets = [part for each in runs.overrides("training.max_steps=3", "run.log_every=1") for part in ("--set", each)]
    ended = cli("train", "--run-dir", tmp_path / "run", flag, "--backend", "inline", *sets)
    assert ended.code == 0, ended.said
    assert sum(line.startswith('{"step"') for line in ended.out) >= lines
    assert bool(ended.out) == bool(lines)
    assert not any("steps/s" in line for line in ended.said)
    assert not any("accuracy" in line for line in ended.said if not line.startswith("andon: "))
    assert any("andon: done: 3 steps" in line for line in ended.said)


def test_slow_updates_are_no_long_silence(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Updates of 5 s, and a line due every 10 updates: one comes at every third too."""
    seconds = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    view = ProgressView(100, 10, "never")
    for step in range(1, 13):
        seconds[0] = 5.0 * step
        view.step({"step": step, "epoch": 0, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1})
    found = re.findall(r"^step (\d+)/100, .* 0.2 steps/s, .* left$", capfd.readouterr().err, re.MULTILINE)
    assert found == ["3", "6", "9", "10"]


def test_a_bar_is_one_line_which_no_message_tears(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal of 40 columns: the loss is the mean of the last 2, the cursor stays visible, each line is whole."""
    reader, terminal = os.openpty()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "__stderr__", stream)
        view = ProgressView(20, 2, epochs=2)
        for step, loss in ((18, 9.0), (19, 1.0), (20, 3.0)):
            view.step({"step": step, "epoch": 1, "loss": loss, "grad_norm": 1.0, "lr": 0.1})
            say("of this process")
        write("of another process\n", stream)
        view.close()
        monkeypatch.setenv("TERM", "dumb")
        assert not moves_cursor(stream)
    written = b""
    with contextlib.suppress(OSError):  # the terminal is closed
        while part := os.read(reader, 1 << 16):
            written += part
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", written.decode())
    lines = re.split(r"\r\n|\r\x1b\[2?K", drawn)
    assert "20/20  loss 2.0000  done" in drawn
    assert {"andon: of this process", "of another process"} <= {*lines}
    assert max(len(line) for line in lines if line.strip("\x1b[?25hl")) <= 40
    assert drawn.index("\x1b[?25h") < drawn.index("20/20")


def test_no_progress_and_progress_as_json_are_not_both(tmp_path: Path) -> None:
    ended = cli("train", "--quiet", "--json", "--run-dir", tmp_path / "run")
    assert ended.code == 2
    assert "--quiet: cannot be combined with --json" in ended.said[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", ["click plan train", "pydantic plan train", "click show judge", "click explain "])
def test_without_its_extra_a_command_says_what_to_install(case: str) -> None:
    """In a base install: one line and 2. `andon explain` needs no extra, as messages of a watch send a reader to it."""
    library, command, extra = case.split(" ")
    absent = f"sys.modules['{library}'] = None; sys.argv = ['andon', '{command}', 'finite']"
    program = f"import sys; {absent}; from andon.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = f"andon: {library} is not installed; run: pip install '.[{extra}]' in a checkout of andon\n"
    assert (done.returncode, done.stderr) == ((2, said) if extra else (0, ""))


def test_help_loads_no_heavy_library() -> None:
    heavy = {"torch", "pydantic", "yaml", "andon.cli.results", "andon_falsify.claims"}
    program = f"import sys; from andon.cli.app import main\ntry: main()\nfinally: assert not {heavy} & {{*sys.modules}}"
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_is_asked_for_by_h_too_and_cuts_no_sentence() -> None:
    runner = CliRunner(env={"COLUMNS": "80"})
    listed = runner.invoke(app, ["--help"]).output.partition("Commands:\n")[2]
    assert "..." not in listed
    names = {line.split()[0] for line in listed.splitlines() if re.match(r"  \w", line)} - {"watch"}  # with its own
    assert {"train", "eval", "plan", "show", "verify"} <= names
    for arguments in ([], *([name] for name in sorted(names))):
        short, long = (runner.invoke(app, [*arguments, flag]) for flag in ("-h", "--help"))
        assert (short.exit_code, short.output) == (0, long.output), arguments


def test_version_is_that_of_the_installed_package(tmp_path: Path) -> None:
    ended = cli("--version", folder=tmp_path)
    assert (ended.code, ended.out, ended.said) == (0, [importlib.metadata.version("andon")], [])


def test_init_writes_what_train_would_do_anyway(tmp_path: Path) -> None:
    assert cli("init", tmp_path / "new").code == 0
    config = tmp_path / "new" / "config.yaml"
    assert load_config(config) == load_config(None)
    ended = cli("check", config, "--set", "run.workers=3", folder=tmp_path)
    assert (ended.code, ended.said) == (0, [])
    said = "\n".join(ended.out)
    rows = "2003 rows to train on, 222 to validate, 500 to evaluate on; 5 classes"
    assert [part for part in (rows, "(gloo: cpu, cpu, cpu)", "idle 11%") if part not in said] == []
    assert tree(tmp_path) == {"new", "new/config.yaml"}
    many = cli("check", config, "--set", "run.workers=20", folder=tmp_path).out
    assert any(line.startswith("workers: 20 (gloo: cpu, ") and ", cpu and 12 more)" in line for line in many)


def test_check_and_plan_take_what_train_takes(tmp_path: Path) -> None:
    rows = write_csv(tmp_path / "rows.csv", range(30))
    given = ("--data", rows, "--text-column", "sentence", "--label-column", "colour", "--backend", "inline")
    checked = cli("check", *given, "--workers", "3")
    assert (checked.code, checked.out[0].split(";")[0][:6]) == (0, "data: "), checked.said
    assert any(line.startswith("workers: 3 (inline: ") for line in checked.out)
    assert cli("plan", *given).code == 0
    refused = cli("check", *given, "--model", "./nothing-here")
    assert refused.said == ["andon: model.base: folder './nothing-here' does not exist"]


def test_texts_that_are_trained_and_evaluated_on_are_counted(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "train.csv", [*range(30), 4, 5])
    held, apart = write_csv(tmp_path / "held.csv", range(27, 40)), write_csv(tmp_path / "apart.csv", range(30, 43))
    columns = ("data.text_column=sentence", "data.label_column=colour", "data.validation_fraction=0")
    runs = Runs(data)
    config = load_config(None, runs.overrides(*columns, f"data.eval={held}"))
    repeated = f"training rows with the text of an earlier one: 2 (first: {data}:32 has the text of {data}:6)"
    assert f"texts: scored rows with the text of a training row: 3 of 13; {repeated}" in list(describe(config))
    said = []
    for name, file in (("held", held), ("apart", apart)):
        more = (*columns, f"data.eval={file}", "training.max_steps=1", "run.backend=inline")
        sets = [part for each in runs.overrides(*more) for part in ("--set", each)]
        ended = cli("train", *sets, "--run-dir", tmp_path / name)
        assert ended.code == 0, ended.said
        said.append([line for line in ended.said if "warning" in line])
    assert sum("the texts of 3 of 13 scored rows are also trained on, so" in line for line in said[0]) == 1
    assert not any("too high" in line for line in said[1])


def test_eval_of_a_file_with_other_columns_than_the_run(run: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (run.parent / "test.jsonl").read_text().splitlines()]
    data = tmp_path / "other.csv"
    data.write_text("what,kind\n,blue\nx,mauve\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows))
    config = shutil.copytree(run, tmp_path / "skips") / "config.yaml"
    config.write_text(config.read_text().replace("bad_rows: refuse", "bad_rows: skip"))
    refused = CliRunner().invoke(app, ["eval", str(run), str(data)])
    assert isinstance(refused.exception, InputError)
    for flag in ("--text-column", "--label-column"):
        assert f"name it with {flag}\n" in f"{refused.exception}\n"
    flags = ("--text-column", "what", "--label-column", "kind")
    inherits = CliRunner().invoke(app, ["eval", str(config.parent), str(data), *flags])
    assert "what is empty; to skip such rows: --bad-rows skip" in str(inherits.exception)
    scored = CliRunner().invoke(app, ["eval", str(config.parent), str(data), *flags, "--bad-rows", "skip"])
    matrix, scores = read_confusion(run / "confusion", outcome(run)["eval"]["confusion"]), json.loads(scored.stdout)
    assert (scores["skipped"], scored.stderr.count("label 'mauve' is unknown")) == (2, 1)
    assert "skipped 2 unusable rows (--bad-rows skip): " in scored.stderr
    assert scores["confusion"] == {"classes": 3, "cells": [list(cell) for cell in matrix.cells]}
    assert scores["labels"] == [one["label"] for one in scores["classes"]] == ["blue", "green", "red"]
    assert [one["support"] for one in scores["classes"]] == [sum(row) for row in matrix.table()]


@pytest.mark.parametrize("module", ["andon.cli.commands", "andon.config.load"])
def test_an_interrupt_while_the_command_is_imported(module: str) -> None:
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job inherits it ignored
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == '{module}': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from andon.cli.app import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, "plan"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "andon: interrupted\n")


def test_predict_names_every_bad_line(run: Path) -> None:
    ended = cli("predict", run, stdin=b"good\n\xff\n\ngood\n")
    assert (ended.code, ended.out) == (2, [])
    faults, remedy = ("2: is not UTF-8: byte 0xff at column 1", "3: the text is empty"), "to skip such rows: --bad-rows"
    assert ended.said == [f"andon: stdin:{fault}; {remedy} skip" for fault in faults]
    ended = cli("predict", run, "--bad-rows", "skip", stdin=b"good\n\xff\n\ngood\n")
    assert (ended.code, len(ended.out), [f"stdin:{n}" in ended.said[0] for n in (2, 3)]) == (0, 2, [True, True])
    assert "skipped 2 unusable rows (--bad-rows skip): stdin:2" in ended.said[0]


def test_torchrun_gives_the_same_bits(run: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text((run / "config.yaml").read_text().replace("workers: 1", "workers: 3"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "andon"]
    command += ["train", str(config), "--backend", "gloo", "--run-dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "run.workers is 3, torchrun started 2; 1 are missing (--workers 3 refuses this)" in done.stderr
    assert re.findall(r"warning: (\S+ \S+)", done.stderr) == ["run.workers is", "--model is", "the texts"]
    assert outcome(tmp_path / "run") == outcome(run)


def test_a_rank_of_torchrun_refuses_another_number_of_workers(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in (ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    ended = andon("train", run / "config.yaml", "--backend", "gloo", "--workers", "2")
    assert ended.code == 2
    assert any("--workers: 2 were requested, torchrun started 1" in line for line in ended.said)


def test_a_plan_in_words_and_as_json(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"data: {{train: {write_jsonl(tmp_path / 'rows.jsonl')}}}\n", encoding="utf-8")
    before = tree(tmp_path)
    ended = cli("plan", config, *SETS, "--workers", "1,3", "--json", folder=tmp_path)
    assert ended.code == 0, ended.said
    found = json.loads("\n".join(ended.out))
    assert [world["workers"] for world in found["worlds"]] == [1, 3]
    each = found["worlds"][0]["devices"][0]["each_rank"]
    assert each["moments"] == 2 * each["weights"] > 0

    few = ("--set", "training.activation_checkpointing=true", "--set", "model.dtype=bfloat16")  # already set
    ended = cli("plan", config, *SETS, *few, "--set", "run.backend=nccl", "--gpu-memory", "0.5", folder=tmp_path)
    assert ended.code == 2, ended.said
    assert any("DOES NOT FIT in the 0.50 GiB" in line for line in ended.out)
    assert "no single setting would make it fit" in ended.out
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("command", "module", "function"),
    [("plan", "andon.training.forecast", "forecast"), ("check", "andon.training.preview", "describe")],
)
def test_a_plan_that_the_kernel_kills_says_so(tmp_path: Path, command: str, module: str, function: str) -> None:
    program = f"""
import os, signal, sys, types
found = types.ModuleType({module!r})
found.{function} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
found.machine_here = lambda *_: None
sys.modules[{module!r}] = found
from andon.cli.app import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program, command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (71, "")
    assert re.fullmatch(rf"andon: {command} was killed by SIGKILL \(.+\)\n", done.stderr)


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("seed: 1\n", encoding="utf-8")
    for flags in (("--workers", "2,x"), ("--workers", "0"), ("--workers", "000019999"), ("--gpu-memory", "-1")):
        ended = cli("plan", config, *flags)
        assert (ended.code, ended.out, len(ended.said)) == (2, [], 1)
        assert flags[1] in ended.said[0]


# What `andon predict` reads and writes

TEXTS = ["red thing", 'a text\nof "two" lines, with a comma', "blue\rthing", "größe ☃", "\x1b]0;title\x07 green"]


def predicted(*arguments: str | Path, stdin: bytes = b"") -> str:
    ended = CliRunner().invoke(app, ["predict", *map(str, arguments)], input=stdin, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def records(*arguments: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in predicted(*arguments).splitlines()]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Texts with numbers of their own, and a column that is none of ours."""
    file = tmp_path / "texts.csv"
    rows = [{"id": f"n{place}", "text": text, "more": place} for place, text in enumerate(TEXTS)]
    file.write_bytes(b"".join(encoded(file, rows)))
    return file


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".json", ".parquet"])
def test_every_kind_of_file_gives_the_same(run: Path, texts: Path, tmp_path: Path, ending: str) -> None:
    told = records(run, texts)
    assert [(one["id"], one["text"]) for one in told] == [(f"n{place}", text) for place, text in enumerate(TEXTS)]
    other = tmp_path / f"other{ending}"
    other.write_bytes(
        b"".join(encoded(other, [{"id": one["id"], "text": one["text"], "more": one["more"]} for one in told]))
    )
    assert records(run, "--data", other) == told


def test_a_column_of_another_name(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.csv"
    file.write_text("what\nred thing\n")
    with pytest.raises(InputError, match=r"texts\.csv:1: has no column 'input' or 'text'.*--text-column"):
        predicted(run, file)
    assert [one["what"] for one in records(run, file, "--text-column", "what")] == ["red thing"]


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_all_columns_go_along_and_none_is_lost_to_a_result(run: Path, tmp_path: Path, ending: str) -> None:
    rows = tmp_path / "rows.jsonl"
    more = {"label": "mine", "input_label": "other", "meta": {"a": [1]}}
    rows.write_text("".join(json.dumps(row) + "\n" for row in ({"text": "red thing", **more}, {"text": "b", "x": 2})))
    output = tmp_path / f"out{ending}"
    predicted(run, rows, "--output", output)
    first, second = read(output)
    assert list(first) == ["text", "input_input_label", "input_label", "meta", "x", "label", "probability", "correct"]
    assert (first["input_input_label"], first["input_label"], first["text"]) == ("mine", "other", "red thing")
    assert (first["meta"] if ending == ".jsonl" else json.loads(first["meta"])) == more["meta"]
    assert (second["text"], str(second["x"]).removesuffix(".0")) == ("b", "2")
    assert first["label"] in ("red", "green", "blue")


def test_texts_are_predicted_in_order_however_they_are_batched(
    run: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of like lengths and windows of a long file change the order of computing, and rounding at most."""
    told = records(run, texts)
    monkeypatch.setattr("andon.model.masks._MOST_ROWS", 1)
    monkeypatch.setattr("andon.training.inference._WINDOW", 2)
    alone = records(run, texts)
    assert [one["id"] for one in alone] == [one["id"] for one in told]
    assert [one["probability"] for one in alone] == pytest.approx([one["probability"] for one in told], abs=2e-6)


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_output_is_what_is_printed(run: Path, texts: Path, tmp_path: Path, ending: str) -> None:
    told = records(run, texts, "--all-scores")
    output = tmp_path / f"out{ending}"
    assert predicted(run, texts, "--all-scores", "--output", output) == f"wrote {output}: {len(TEXTS)} rows\n"
    assert tree(tmp_path) == {"texts.csv", output.name}
    found = read(output)
    assert [(one["id"], one["text"], one["label"]) for one in found] == [
        (one["id"], one["text"], one["label"]) for one in told
    ]
    for one, printed in zip(found, told, strict=True):
        assert list(printed["scores"]) == ["blue", "green", "red"]
        assert sum(printed["scores"].values()) == pytest.approx(1, abs=2e-6)  # each is rounded to six places
        assert printed["scores"][printed["label"]] == printed["probability"] == max(printed["scores"].values())
        scores = one["scores"] if ending == ".jsonl" else {name: one[f"scores_{name}"] for name in printed["scores"]}
        for name, value in printed["scores"].items():
            assert float(scores[name]) == pytest.approx(value, abs=1e-6)
            assert float(scores[name]) != value  # six places are not all that there are


def read(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".parquet":
        import pyarrow.parquet

        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
        return rows
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="," if file.suffix == ".csv" else "\t"))


def test_an_output_is_whole_or_not_there(run: Path, texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    output.write_text("mine")
    with texts.open("a", encoding="utf-8") as file:
        file.write('"n5","  ",5\n')
    with pytest.raises(InputError, match=r"texts\.csv:8: text is only white space"):
        predicted(run, texts, "--output", output)
    before = texts.read_bytes()
    with pytest.raises(InputError, match="is the file that is read"):
        predicted(run, texts, "--output", texts)
    assert (output.read_text(), texts.read_bytes()) == ("mine", before)
    assert tree(tmp_path) == {"texts.csv", "out.csv"}


def test_weights_of_a_checkpoint_are_used_by_name_or_step(tmp_path: Path, texts: Path) -> None:
    runs, folder = Runs(write_jsonl(tmp_path / "train.jsonl")), tmp_path / "run"
    often = ("training.checkpoint_every=2", "training.keep_checkpoints=9", "training.max_steps=6")
    assert runs.train(folder, *often, "optimizer.lr=0.05") == 0
    found = {name: records(folder, texts, "--checkpoint", name) for name in ("2", "last", "6", "best")}
    assert found["2"] != found["6"] == found["last"]
    best = summary(folder)["best_step"]
    assert found["best"] == records(folder, texts, "--checkpoint", str(best))
    opened = andon_package.open_run(folder, checkpoint=2).predict(["red thing"])
    assert [one.label for one in opened] == [found["2"][0]["label"]]
    cut = shutil.copytree(folder, tmp_path / "cut", ignore=shutil.ignore_patterns("adapter", "summary.json"))
    assert [records(cut, texts, "--checkpoint", name) for name in ("2", "last")] == [found["2"], found["6"]]
    data = tmp_path / "train.jsonl"
    for name, step in (("2", 2), ("last", 6)):
        ended = [cli("eval", each, data, "--checkpoint", name) for each in (folder, cut)]
        assert [each.code for each in ended] == [0, 0], ended
        assert ended[0].out == ended[1].out
        assert json.loads("".join(ended[1].out))["checkpoint"] == step
    assert andon_package.open_run(cut, checkpoint=2).evaluate(data)["checkpoint"] == 2
    with pytest.raises(InputError, match=r"is not finished \(after step 6 of 6\); resume .* --checkpoint last"):
        predicted(cut, texts)
    (cut / "summary.json").write_text(json.dumps({k: v for k, v in summary(folder).items() if k != "best_step"}))
    with pytest.raises(InputError, match="no validation took place; use last, or a step: there are 2, 4, 6"):
        predicted(cut, texts, "--checkpoint", "best")
    for name, what in (
        ("3", r"has no checkpoint of step 3; there are 2, 4, \d"),
        ("first", "'first' is not best, last or a step; there are 2, 4, "),
    ):
        with pytest.raises(InputError, match=what):
            predicted(folder, texts, "--checkpoint", name)
    for command in (["eval", "--data", str(tmp_path / "train.jsonl")], ["export", str(tmp_path / "out"), "--merge"]):
        given = [command[0], str(folder), *command[1:], "--checkpoint", "2"]
        ended = CliRunner().invoke(app, given, catch_exceptions=False)
        assert ended.exit_code == 0, ended.output
    card = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert "These are the weights of the run's checkpoint of step 2; the scores," in card


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_the_remedy(run: Path, texts: Path) -> None:
    for name, what in (("cuda", "GPU 0 does not exist; this machine has 0; or use auto"), ("tpu", "is not a device")):
        with pytest.raises(InputError, match=f"--device: .*{what}"):
            predicted(run, texts, "--device", name)
    assert records(run, texts, "--device", "auto") == records(run, texts, "--device", "cpu")


def test_an_output_that_cannot_be_is_refused_before_anything_is_read(run: Path, tmp_path: Path) -> None:
    for output, what in (
        (tmp_path / "out.xlsx", "unknown kind of file"),
        (tmp_path / "no" / "out.csv", "does not exist"),
    ):
        with pytest.raises(InputError, match=what):
            predicted(run, tmp_path / "none.csv", "--output", output)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InputError, match="exists and is not a regular file"):
        predicted(run, "--output", tmp_path / "folder.csv")
    with pytest.raises(InputError, match="name one file"):
        predicted(run, "a.csv", "--data", "b.csv")


@pytest.mark.parametrize(
    ("first", "warned"),
    [
        ("text,label", True),
        ("id;input", True),
        ('"text"\tlabel', True),
        ('{"text": "red"}', True),
        ("text", False),
        ("a text, and a label", False),
    ],
)
def test_a_table_on_standard_input_is_not_guessed_but_told(run: Path, first: str, warned: bool) -> None:
    ended = CliRunner().invoke(app, ["predict", str(run)], input=f"{first}\nred thing\n", catch_exceptions=False)
    assert [json.loads(line)["text"] for line in ended.stdout.splitlines()] == [first, "red thing"]
    assert (f"andon predict {run} --data FILE.csv" in ended.stderr) == warned == bool(ended.stderr)


def test_a_column_of_standard_input_is_refused(run: Path) -> None:
    with pytest.raises(InputError, match=r"--text-column: is for files, .* --data FILE\.csv --text-column what"):
        predicted(run, "--text-column", "what", stdin=b"what\nred\n")


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on a base in a folder, which has gone to `there`; `other` holds another base."""
    folder = tmp_path_factory.mktemp("moved")
    rows = write_csv(folder / "train.csv", range(30))
    runs, columns = Runs(rows), ("data.text_column=sentence", "data.label_column=colour", "training.max_steps=2")
    for name, seed in (("base", "seed=1"), ("other", "seed=2")):
        assert runs.train(folder / f"run-{name}", *columns, seed, "adapter.kind=none") == 0
        shutil.copytree(folder / f"run-{name}" / "adapter", folder / name)
    assert runs.train(folder / "run", *columns, f"model.base={folder / 'base'}") == 0
    before = records(folder / "run", rows)
    (folder / "base").rename(folder / "there")
    (folder / "before.json").write_text(json.dumps(before))
    return folder


def test_a_base_that_has_moved_is_named(moved: Path, tmp_path: Path) -> None:
    rows = moved / "train.csv"
    with pytest.raises(InputError, match="is not a local folder; if it has moved, name its place: --model PATH"):
        predicted(moved / "run", rows)
    assert records(moved / "run", rows, "--model", moved / "there") == json.loads((moved / "before.json").read_text())
    for command in (["eval", str(rows)], ["export", str(tmp_path / "out")]):
        given = [command[0], str(moved / "run"), *command[1:], "--model", str(moved / "there")]
        assert CliRunner().invoke(app, given).exit_code == 0


def test_another_base_is_refused(moved: Path, run: Path) -> None:
    with pytest.raises(InputError, match=r"the base model has digest \w{16}, the adapter was trained on \w{16}"):
        predicted(moved / "run", moved / "train.csv", "--model", moved / "other")
    for folder, why in ((run, "embedded model"), (moved / "run-base", "its folder has the whole model")):
        with pytest.raises(InputError, match=f"needs no base.*{why}"):
            predicted(folder, moved / "train.csv", "--model", moved / "there", "--text-column", "sentence")
    assert len(records(moved / "run-base", moved / "train.csv")) == 30
