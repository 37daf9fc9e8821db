"""`andon report`: the page shows what the files of a run say, hides no spike, and does nothing but be read."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from andon.config.schema import UNUSED_WITH_BASE, Model
from andon.inspection.difference import compare, read_side
from andon.inspection.recorded import open_recorded
from andon.inspection.report.curves import MOST_BUCKETS, Series, bucketed, draw
from andon.inspection.report.page import Page, Verdict, load_run_view, render
from andon.metrics.scores import Confusion, digest_of, read_confusion, write_confusion
from andon.run.folder import RunFolder
from andon.run.summary import Head, Summary, write_summary
from andon_contracts.fields import Real
from andon_contracts.record import Broken, End, Evaluation, Plan, Record, Resume, Step
from tests.cli.command import cli, tree
from tests.inspection.ledgers import FINGERPRINT, digest, resumed_run, retracted_run, start, step, whole_run, write
from tests.support.pages import Shown, Tables
from tests.training.runs import Runs, records, summary

HOSTILE = "</style></title><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{ 1913 * 4547 }}\u202eevil\x1b[2J"
SEEN = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b")
LONG = 2_500


def page_of(*paths: Path, verdicts: Sequence[Verdict | None] | None = None) -> Tables:
    runs = [load_run_view(read_side(path)) for path in paths]
    apart = compare(runs[0].side, runs[1].side) if len(runs) > 1 else None
    return Tables(render(Page(runs, verdicts or [None] * len(runs), apart)))


def curve(page: Tables, title: str, series: str = "training") -> dict[int, float | None]:
    """The numbers behind a picture by step, where it shows each."""
    labels = [each["aria-label"] for each in page.of("div") if "low" in each.get("class", "")]
    numbers = [table for table in page.tables if table.rows[0] in (["step", "value"], _BUCKETS)]
    (shown,) = (table for label, table in zip(labels, numbers, strict=True) if label == f"{title}: numbers of {series}")
    return {int(name): value for name, (value,) in list(shown.numbers().items())[1:]}


_BUCKETS = ["steps", "lowest", "highest", "not finite"]


def reals(found: list[Step], name: str) -> dict[int, float]:
    return {each.step: getattr(each, name).value for each in found}


# What the page says is what the files say


def test_every_number_of_a_run_is_that_of_its_files(run: Path) -> None:
    page, steps, found = page_of(run), records(run, "step"), summary(run)
    for title, field in (("Loss", "loss"), ("Learning rate", "lr"), ("Gradient norm", "grad_norm")):
        assert curve(page, title) == reals(steps, field)
    assert curve(page, "Accuracy") == {each.step: each.correct / each.count for each in steps}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert curve(page, "Step time") == {line["step"]: line["seconds"] for line in lines if "seconds" in line}

    validation = {line["step"]: line["loss"] for line in lines if line.get("what") == "validation"}
    assert len(validation) == 2
    assert curve(page, "Loss", "validation") == validation

    scores = page.named("Scores")
    single = {name: value for name, value in found["eval"].items() if isinstance(value, float)}
    assert {name: value for name, (value,) in scores.numbers().items() if value is not None} == single
    assert scores.by_name()["rows"] == [str(found["eval"]["rows"])]
    assert scores.by_name()["of"] == [f"{found['evaluated_on']} rows"]
    classes = page.named("Scores: classes")
    for label, each in zip(found["labels"], found["eval"]["classes"], strict=True):
        shown = dict(zip(classes.rows[0][1:], classes.numbers()[label], strict=True))
        assert {name: value for name, value in shown.items() if value is not None} == {
            name: value for name, value in each.items() if isinstance(value, float)
        }
    matrix = page.named("Confusion matrix")
    assert matrix.rows[0][1:] == found["labels"]
    assert [[int(cell) for cell in row[1:]] for row in matrix.rows[1:]] == read_confusion(
        run / "confusion", found["eval"]["confusion"]
    ).table()
    clauses = page.named("Evaluations in rank 0").by_name()
    assert {name: int(row[0]) for name, row in list(clauses.items())[1:]} == found["contracts"]


def test_settings_machine_and_digests_are_those_of_the_run(run: Path) -> None:
    page, found = page_of(run), summary(run)
    glance = page.named("At a glance").by_name()
    assert glance["weights of the result"] == [f"{found['weights_digest']}, of step {found['kept_step']}"]
    assert glance["weights after the last step"] == [records(run, "step")[-1].digests.weights]
    settings = page.named("Settings")
    assert settings.by_name()["optimizer.lr"] == ["0.01", "0.0025"]
    rows = [row[0] for row in settings.rows[1:]]
    assert rows.index("optimizer.lr") < rows.index("optimizer.eps")
    packages = json.loads((run / "environment.json").read_text())["packages"]
    shown = page.named("Where it ran").by_name()
    assert {name: shown[name] for name in packages} == {name: [version] for name, version in packages.items()}


def test_the_command_repeats_the_run(run: Path, tmp_path: Path) -> None:
    code = page_of(run).page.split("Repeat the run:</p>")[1].split("<code>")[1].split("</code>")[0]
    command = [str(tmp_path / "again") if word == "ANOTHER_FOLDER" else word for word in shlex.split(code)]
    assert command[0] == "andon"
    assert cli(*command[1:], folder=tmp_path).code == 0
    assert summary(tmp_path / "again")["weights_digest"] == summary(run)["weights_digest"]


def test_settings_of_the_embedded_model_are_told_of_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = f"data:\n  train: [{tmp_path}/a.csv, /elsewhere/b.csv]\n"
    told = []
    for name, model in (("embedded", ""), ("based", f"model:\n  base: {tmp_path}/models/m\n")):
        told.append(page_of(configured(tmp_path / name, f"{files}{model}")).named("Settings").by_name())
    assert {name for name in told[0] if name not in told[1]} == UNUSED_WITH_BASE
    assert told[1]["model.base"][0] == "models/m"
    assert [each["path"] for each in json.loads(told[1]["data.train"][0])] == ["a.csv", "/elsewhere/b.csv"]
    assert {f"model.{name}" for name in Model.model_fields} > UNUSED_WITH_BASE


def configured(folder: Path, text: str) -> Path:
    folder.mkdir()
    write(folder / "ledger.jsonl", whole_run())
    (folder / "config.yaml").write_text(text)
    return folder


def test_packs_are_not_called_rows(tmp_path: Path) -> None:
    for name, unit in (("true", "packs"), ("false", "rows")):
        page = page_of(configured(tmp_path / name, f"training:\n  packing: {name}\n"))
        facts = page.named("At a glance").by_name()
        assert [row for row in facts if row.endswith(("an epoch", "a step"))] == [f"{unit} an epoch", f"{unit} a step"]


def test_the_page_of_two_runs_is_not_written_over_that_of_one(tmp_path: Path) -> None:
    one, other = (configured(tmp_path / name, "") for name in ("one", "other"))
    assert cli("report", one).out == [f"wrote {one / 'report.html'}"]
    alone = (one / "report.html").read_text()
    assert cli("report", one, other).out == [f"wrote {one / 'report-other.html'}"]
    assert (one / "report.html").read_text() == alone
    ledger = one / "ledger.jsonl"
    assert cli("report", ledger, other / "ledger.jsonl").out == [f"wrote {one / 'ledger-ledger.html'}"]


def test_the_command_writes_the_page_and_says_where(run: Path, tmp_path: Path) -> None:
    before = tree(run)
    done = cli("report", run)
    assert (done.code, done.out) == (0, [f"wrote {run / 'report.html'}"])
    assert tree(run) - before == {"report.html"}
    judged = cli("verify", "-v", run)
    assert judged.out[-1].startswith("checked ")
    page = Tables((run / "report.html").read_text(encoding="utf-8"))
    assert [line for line in judged.out if line not in map(str.strip, page.text)] == []
    (run / "report.html").unlink()

    done = cli("report", write(tmp_path / "l.jsonl", whole_run()))
    assert (done.code, done.out) == (0, [f"wrote {tmp_path / 'l.html'}"])


def test_what_is_no_run_or_no_page_is_refused(run: Path, tmp_path: Path) -> None:
    for arguments, said in (
        ((run / "config.yaml",), "is a configuration"),
        ((run, "--html", run / "ledger.jsonl"), "must end in .html"),
        ((run, "--html", tmp_path / "no" / "folder.html"), "cannot be written"),
    ):
        done = cli("report", *arguments)
        assert done.code == 2
        assert said in " ".join(done.said)
    assert not (run / "config.html").exists()


# Runs that did not simply end


def test_a_run_that_was_killed_and_goes_on_says_both(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    runs.train(folder, backend="gloo", workers=2, entry="tests.training.entries:kill_rank")
    page = page_of(folder)
    assert "unfinished" in page.named("What happened").by_name()
    assert "andon train" in page.page.split("Continue the run:</p>")[1].split("</code>")[0]
    assert "There is no summary.json yet" in " ".join(page.text)
    died = page.named("How the last launch")
    assert set(died.by_name()) <= {"rank", "rank 0"}  # rank 1 was killed, and could not say anything

    assert runs.train(folder, resume="auto") == 0
    page = page_of(folder)
    story = page.named("What happened").by_name()
    assert story["cut off"] == ["after step 6, without an end record: the process was killed or failed"]
    assert story["resume"][0].startswith("after step 6 from step-00000006")
    assert curve(page, "Loss") == reals(records(folder, "step"), "loss")
    assert page.named("At a glance").by_name()["how it ended"] == ["finished"]


def test_a_run_that_ended_in_a_violation_shows_it_first(tmp_path: Path) -> None:
    page = page_of(write(tmp_path / "l.jsonl", retracted_run()))
    assert any(each.get("class") == "alert" for each in page.of("p"))
    assert " at step 2: other weights" in page.text
    story = page.named("What happened").by_name()
    assert story["retraction"][0].startswith("step 2 no longer counts")
    # The step that was done again counts, and not the one that was taken back.
    assert page.named("At a glance").by_name()["weights after the last step"] == [digest(23)]


def test_a_preempted_run_can_be_gone_on_with(runs: Runs, tmp_path: Path) -> None:
    folder = runs.stopped(tmp_path / "run", 7)
    assert page_of(folder).named("At a glance").by_name()["how it ended"] == ["preempted"]
    assert summary(folder)["reason"] == "preempted"
    kept = RunFolder(folder).summary.read_bytes()
    assert runs.train(folder, resume="auto") == 0
    RunFolder(folder).summary.write_bytes(kept)
    text = " ".join(page_of(folder).text)
    assert "is older than the ledger" in text
    assert "Evaluations in rank 0" not in text


def test_the_ledger_of_a_watch_has_what_the_watch_knows(tmp_path: Path) -> None:
    plan = Plan(rows=None, batch_size=None, micro_batches=None, seed=None, epochs=None, steps=None)
    bare = [
        step(number, (), loss=None, correct=None, count=None, epoch=None, position=None, gradient_at="optimizer")
        for number in (1, 2)
    ]
    loaded = Resume(0, "0" * 64, FINGERPRINT, {}, 2, "gloo", name="last.pt")
    warned = Broken("finite", 2, (1,), "", HOSTILE, action="warned")
    scored = Evaluation(2, None, 5, {"rmse": Real.of(0.25)})
    lines: list[Record] = [start(plan=plan, writer="watch"), loaded, *bare, warned, scored]
    page = page_of(write(tmp_path / "l.jsonl", lines))
    titles = [text for text in page.text if text in ("Loss", "Accuracy", "Learning rate", "Gradient norm", "rmse")]
    assert set(titles) == {"Learning rate", "Gradient norm", "rmse"}
    assert page.named("Scores").numbers()["rmse"] == [0.25]
    assert "cut off" not in page.named("What happened").by_name()
    assert f" at step 2: {SEEN}" in page.text


def test_other_scores_than_of_classes_are_shown_by_name(tmp_path: Path) -> None:
    scores = {"rmse": 0.5, "rows": 7, "by": {"q50": 1.25}, "heads": [{"mae": 2.5}], "no": None}
    scores |= {"sources": {"web": {"loss": 0.75}, "chat": {"tokens": 9}}}
    page = page_of(hostile_run(tmp_path / "run", scores))
    assert page.named("Scores").numbers()["by.q50"] == [1.25]
    assert page.named("Scores").by_name()["rows"] == ["7"]
    assert page.named("Scores: heads").exact[1][1] == 2.5
    sources = page.named("Scores: sources")
    assert sources.rows == [["sources", "tokens", "loss"], ["chat", "9", "unknown"], ["web", "unknown", "0.7500"]]
    assert "no" not in page.named("Scores").by_name()


# Two runs


def test_two_runs_are_shown_side_by_side_with_where_they_part(runs: Runs, run: Path, tmp_path: Path) -> None:
    assert runs.train(tmp_path / "other", "optimizer.momentum=0.5", "optimizer.lr=0.02") == 0
    page = page_of(run, tmp_path / "other")
    lines = compare(read_side(run), read_side(tmp_path / "other")).lines
    assert any(line.startswith("steps     differ from step 1 on") for line in lines)
    assert [line for line in lines if line not in page.text] == []
    assert "The first step that differs is step 1." in page.text
    assert len([each for each in page.of("line") if each.get("class") == "mark"]) == 5  # all that begin at step 1
    assert {row[0] for row in page.named("Settings").rows[1:4]} >= {"optimizer.lr", "optimizer.momentum"}
    for side, name in ((run, "run"), (tmp_path / "other", "other")):
        assert curve(page, "Loss", f"{name}: training") == reals(records(side, "step"), "loss")
    assert len(list(page.all_named("Confusion matrix"))) == 2


def scored_run(folder: Path, matrix: Confusion) -> Path:
    folder.mkdir()
    write_confusion(folder / "confusion", matrix)
    scored = Evaluation(1, 0, 3, {"accuracy": Real.of(1.0)}, digest_of(matrix))
    write(folder / "ledger.jsonl", [start(), step(1, (2, 0)), scored])
    return folder


def test_a_matrix_of_thousands_of_classes_is_told_and_not_shown(tmp_path: Path) -> None:
    page = page_of(scored_run(tmp_path / "r", Confusion(3200, ((0, 0, 1), (7, 7, 1), (3199, 3199, 1)))))
    assert not list(page.all_named("Confusion matrix"))
    assert "The confusion matrix has 3200 classes, more than the 100 that are shown." in page.text


def test_two_of_the_same_part_nowhere(run: Path, tmp_path: Path) -> None:
    page = page_of(run, run)
    assert "All common steps are the same to the bit." in page.text
    assert str(run) in page.named("At a glance").rows[0]
    ledger = write(tmp_path / "l.jsonl", [start(), step(7, (2, 0))])
    assert "The runs have no step in common." in page_of(write(tmp_path / "m.jsonl", whole_run()), ledger).text


# A page that only is read


def hostile_run(folder: Path, scores: dict[str, object]) -> Path:
    """A run folder whose every text is somebody's who means harm."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"data:\n  train: {json.dumps(HOSTILE)}\n", encoding="utf-8")
    environment = {"cpu": HOSTILE, "packages": {HOSTILE: HOSTILE}, "flags": {HOSTILE: HOSTILE}}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "provenance.json").write_text(json.dumps({"digests": {}, "fingerprint": {}, "commit": HOSTILE}))
    matrix = Confusion(2, ((0, 0, 1), (0, 1, 2), (1, 1, 2)))
    write_confusion(folder / "confusion", matrix)
    lines: list[Record] = [
        start(run=HOSTILE, fingerprint={"torch": HOSTILE}, backend=HOSTILE),
        step(1, (2, 0), backend=HOSTILE),
        Evaluation(1, 0, 5, {HOSTILE: Real.of(0.25)}, digest_of(matrix)),
        Broken(HOSTILE, 1, (0,), HOSTILE, HOSTILE, {HOSTILE: HOSTILE}),
        End(1, HOSTILE, {HOSTILE: digest(3)}),
    ]
    write(folder / "ledger.jsonl", lines)
    _, head = open_recorded(folder).head
    found = Summary(
        run=HOSTILE, finished=False, reason=HOSTILE, steps=1, world_size=2, backend=HOSTILE, weights_digest=digest(1),
        initial_weights_digest=digest(2), contracts={HOSTILE: 3}, violations=1, wall_s=1.0, fingerprint={},
        ledger=Head(len(lines), head), labels=(HOSTILE, "b"),
        eval=scores, evaluated_on=HOSTILE,
    )  # fmt: skip
    write_summary(folder / "summary.json", found)
    metrics = {"step": 1, "rows": 5, "what": HOSTILE, HOSTILE: 0.25}
    (folder / "metrics.jsonl").write_text(f"{json.dumps(metrics)}\nno line\n[]\n")
    reports = folder / "reports"
    reports.mkdir()
    said = {"rank": 0, "exit": 1, "cause": HOSTILE, "time": 0.0, "message": HOSTILE}
    (reports / "rank-0.json").write_text(json.dumps(said))
    return folder


def test_texts_of_others_are_shown_as_they_are(tmp_path: Path) -> None:
    scores = {HOSTILE: 0.5, "classes": [{"label": HOSTILE, HOSTILE: HOSTILE}, {}]}
    folder = hostile_run(tmp_path / "run", scores)
    for paths in ((folder,), (folder, folder)):
        page = page_of(*paths, verdicts=[Verdict(1, (HOSTILE, HOSTILE))] * len(paths))
        assert sum(SEEN in text for text in page.text) > 20
        assert {tag for tag, _ in page.elements} & {"script", "img", "iframe", "object", "link"} == set()
        assert [name for _, attributes in page.elements for name in attributes if name.startswith("on")] == []
        assert "8698411" not in "".join(page.text)
        assert page.page.encode("utf-8").count(b"\x1b") == 0
        assert "2 lines of metrics.jsonl" in " ".join(page.text)


def test_metrics_without_a_line_end_are_not_read_to_their_end(tmp_path: Path) -> None:
    folder = hostile_run(tmp_path / "run", {HOSTILE: 0.5})
    with (folder / "metrics.jsonl").open("wb") as file:
        file.truncate(1 << 42)
    assert "1 lines of metrics.jsonl" in " ".join(page_of(folder).text)


def test_the_page_is_closed_in_itself(run: Path) -> None:
    for page in (page_of(run), page_of(run, run)):
        loading = {"src", "srcset", "href", "action", "style", "data", "poster"}
        assert [attributes for _, attributes in page.elements if loading & attributes.keys()] == []
        assert page.of("script") == []
        assert re.findall(r"@import|url\(|//", re.findall(r"<style>(.*?)</style>", page.page, re.DOTALL)[0]) == []
        (policy,) = [each["content"] for each in page.of("meta") if "http-equiv" in each]
        assert re.fullmatch(
            r"default-src 'none'; style-src 'sha256-[\w+/]{43}='; base-uri 'none'; form-action 'none'", policy
        )


def test_who_does_not_see_the_pictures_has_their_words_and_numbers(run: Path) -> None:
    page = page_of(run)
    given = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(given) == len(set(given))
    pictures = [each for each in page.of("svg") if each.get("role") == "img"]
    assert len(pictures) == 7
    for each in pictures:
        assert each["tabindex"] == "0"
        assert set(each["aria-labelledby"].split()) <= set(given)
    assert len(page.of("details")) >= len(pictures)
    regions = [each for each in page.of("div") if each.get("class", "").startswith("scroll")]
    assert all(each["tabindex"] == "0" and each["role"] == "region" and each["aria-label"] for each in regions)
    assert len(regions) == len(page.tables)
    assert all(table.caption for table in page.tables)


# Long runs


def long_run(path: Path) -> Path:
    """A ledger of 2,500 steps with a spike in the loss, a loss of NaN, and an evaluation every 50 steps."""

    def lines(number: int) -> list[Record]:
        odd = {1_944: 1e6, 1_250: math.nan}.get(number, 1 + 0.5 * math.sin(number))
        ids = tuple(range(16))
        parts = step(number, (2, 0), loss=Real.of(odd), lr=Real.of(1 - number / (LONG + 1)))
        parts = replace(parts, ids=ids + ids, ranks=tuple(replace(each, ids=ids) for each in parts.ranks))
        scores = {name: Real.of(1 / number) for name in ("accuracy", "loss", "macro_f1", "mcc")}
        return [parts, *([Evaluation(number, 0, 100, scores)] if number % 50 == 0 else [])]

    return write(path, [start(), *(line for number in range(1, LONG + 1) for line in lines(number))])


def test_a_long_run_is_a_small_page_that_hides_no_spike(tmp_path: Path) -> None:
    path = long_run(tmp_path / "l.jsonl")
    page = page_of(path, path)
    assert len(page.page.encode()) <= 2_000_000
    buckets: Shown = next(table for table in page.tables if table.rows[0] == _BUCKETS)
    assert len(buckets.rows) == 1 + MOST_BUCKETS
    assert buckets.numbers()["1941 to 1950"][1] == 1e6
    assert buckets.by_name()["1241 to 1250"][2] == "1"
    lost = [attributes for tag, attributes in page.elements if tag == "path"]
    assert len(lost) == 2
    spiked = next(each["points"] for each in page.of("polyline") if len(each["points"]) > 2000)
    second = page.of("polyline")[[each["points"] for each in page.of("polyline")].index(spiked) + 1]["points"]
    heights = [float(point.split(",")[1]) for point in f"{spiked} {second}".split()]
    assert min(heights) == 10.0  # the top of the picture, where a million is
    assert page.named("At a glance").by_name()["steps"] == ["2500 of 2"] * 2


@example([(1, 1.2e308)])
@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats()), min_size=1, max_size=60, unique_by=lambda each: each[0]))
def test_buckets_have_every_extreme_and_every_count(points: list[tuple[int, float]]) -> None:
    points = sorted(points)
    found = bucketed(points, most=7)
    assert len(found) <= 7
    assert sum(each.count for each in found) == len(points)
    assert sum(each.lost for each in found) == sum(not math.isfinite(value) for _, value in points)
    drawn = [point for each in found for point in each.drawn]
    assert set(drawn) <= set(points)
    finite = [value for _, value in points if math.isfinite(value)]
    picture = draw("t", "", [Series("s", points)])
    assert (picture is None) == (not finite)
    if picture is not None:
        assert {min(finite), max(finite)} <= {value for _, value in drawn}
        places = [float(number) for line in picture.drawn[0].lines for number in re.split("[ ,]", line)]
        assert all(map(math.isfinite, places))
        assert all(-1 <= float(height) <= 201 for height, _ in picture.ticks)


def test_a_resumed_ledger_shows_each_step_once(tmp_path: Path) -> None:
    page = page_of(write(tmp_path / "l.jsonl", resumed_run()))
    assert curve(page, "Loss") == {1: 1.0, 2: 0.5}
