"""Equivalence classes in a file: command lines that must train alike, each compared with the first of its class."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from andon.config.load import parse
from andon.console.messages import Problem, ProblemList, did_you_mean, reading, shown
from andon_falsify.campaign.request import read_seeds
from andon_falsify.campaign.run import here
from andon_falsify.campaign.script_bench import PLACE, UNPERTURBED, Done, ScriptBench, new_folder, run, unusable
from andon_falsify.campaign.trial import BUDGETS, Budget
from andon_falsify.claims.evidence import RunUnavailable
from andon_falsify.claims.explain import explain_ratio
from andon_falsify.claims.same_everywhere import CLAIM, check_class
from andon_falsify.history import History
from andon_falsify.report.document import misfits
from andon_falsify.report.findings import Expected, Finding, Report
from andon_falsify.verdict import Verdict, merge, unknown

_Text = Annotated[str, Field(min_length=1)]


class _Class(BaseModel, extra="forbid", strict=True):
    name: _Text = ""
    alike: Annotated[list[Any], Field(min_length=2)]
    expected_failed: _Text = ""


class _File(BaseModel, extra="forbid", strict=True):
    name: _Text = ""
    command: _Text = "{flags}"
    values: dict[str, Any] = {}
    budget: Literal["quick", "standard", "deep"] = "quick"
    seeds: Any = 0
    classes: Annotated[list[_Class], Field(min_length=1)]


class Member(NamedTuple):
    """A command line. text: without values for {seed} and {folder}. label: what the file says of it."""

    text: str
    label: str

    def words(self, seed: int, folder: str) -> list[str]:
        values = {"seed": str(seed), "folder": shlex.quote(folder)}
        return shlex.split(PLACE.sub(lambda found: values.get(found["name"], found["literal"] or found[0]), self.text))


class Class(NamedTuple):
    """Command lines that must train alike. expected_failed: why they do not, or ""."""

    title: str
    members: tuple[Member, ...]
    expected_failed: str


class Classes(NamedTuple):
    """What a file requests."""

    path: Path
    name: str
    budget: Budget
    seeds: tuple[int, ...]
    classes: tuple[Class, ...]


def read_classes(path: Path, budget: str | None, seed: str | None, only: Sequence[str] = ()) -> Classes:
    """The classes in the file `path`. budget, seed: replace those of the file. only: the classes to run, by name.

    Raises `InputError` with all problems of the file and of these options.
    """
    with reading(path, "is not UTF-8"):
        text = path.read_text(encoding="utf-8")
    problems, wrong = ProblemList(), list[Problem]()
    values, lines = parse(text, str(path), problems)

    def at(*parts: str | int) -> str:
        key = tuple(map(str, parts))
        line = next((lines[key[:end]] for end in range(len(key), 0, -1) if key[:end] in lines), 1)
        return f"{path}:{line} {'.'.join(key)}".rstrip()

    try:
        file = _File.model_validate(values)
    except ValidationError as error:
        for fault, (_, what) in zip(error.errors(), misfits(error), strict=True):
            if fault["type"] == "extra_forbidden":
                known = _Class if fault["loc"][0] == "classes" else _File
                what = f"unknown key{did_you_mean(str(fault['loc'][-1]), known.model_fields)}"
            elif fault["input"] is None:
                what = "is empty: give a value"
            elif fault["type"] == "too_short":
                what = f"needs at least {fault['ctx']['min_length']} entries"
            problems.add(at(*fault["loc"]), what)
        problems.raise_if_any()
        raise
    if (budget or file.budget) not in BUDGETS:
        problems.add("--budget", f"must be one of {', '.join(BUDGETS)}, not {budget!r}")
    seeds = read_seeds(at("seeds") if seed is None else "--seed", str(file.seeds) if seed is None else seed, wrong)
    classes = dict[str, Class]()
    for number, each in enumerate(file.classes):
        members = list[Member]()
        for place, given in enumerate(each.alike):
            member, faults = _member(file, {"flags": given} if isinstance(given, str) else given)
            if not faults and member.text in [other.text for other in members]:
                faults = [f"{shown(member.label)} is in this class already"]
            members += [] if faults else [member]
            for what in faults:
                problems.add(at("classes", number, "alike", place), what)
        title = each.name or " = ".join(member.label for member in members)
        if title in classes:
            problems.add(at("classes", number), f"an earlier class has the name {shown(title)} too")
        classes[title] = Class(title, tuple(members), each.expected_failed)
    wrong += [Problem("--only", f"no class is {name!r}{did_you_mean(name, classes)}") for name in {*only} - {*classes}]
    for problem in wrong:
        problems.add(problem.where, problem.what)
    problems.raise_if_any()
    chosen = tuple(each for each in classes.values() if not only or each.title in only)
    return Classes(path, file.name or path.name, BUDGETS[budget or file.budget], seeds, chosen)


def _member(file: _File, own: Any) -> tuple[Member, list[str]]:
    if not isinstance(own, Mapping) or not all(isinstance(each, str | int | float) for each in own.values()):
        return Member("", ""), [f"must be a text, or placeholders with their values, not {shown(own)}"]
    places = {found["name"] for found in PLACE.finditer(file.command)}
    faults = [f"{{{name}}} is not in the command" for name in own if name not in places]
    values = {"flags": "", **file.values, **own}
    text = PLACE.sub(lambda found: str(values.get(found["name"], found[0])), file.command)
    left = {found["name"] for found in PLACE.finditer(text) if found["name"]} - {"seed", "folder"}
    faults += [f"{{{name}}} has no value; give it here or in values" for name in sorted(left)]
    try:
        faults += [] if shlex.split(text) else ["is an empty command"]
    except ValueError as error:
        faults.append(f"cannot be split into words: {str(error).lower()} ({shown(text)})")
    label = ", ".join(str(value) if name == "flags" else f"{name} {value}" for name, value in own.items())
    return Member(text, label), faults


@dataclass
class ClassCampaign:
    """Runs the classes of a file; each command line once for each seed. about: a report without findings."""

    requested: Classes
    about: Report = field(default_factory=partial(here, ("andon", "torch")))
    runs: int = 0
    found: list[Finding] = field(default_factory=list)
    _done: dict[tuple[str, int, str | None], Done] = field(default_factory=dict)

    @property
    def trials(self) -> Sequence[Class]:
        return self.requested.classes * len(self.requested.seeds)

    @property
    def opening_line(self) -> str:
        file, n = self.requested, len(self.requested.classes)
        seeds = " to ".join(map(str, dict.fromkeys((file.seeds[0], file.seeds[-1]))))
        return f"{file.name}; budget {file.budget.name}, seed {seeds}: {n} class{'es' * (n != 1)} of command lines"

    def run(self) -> Iterator[tuple[Class, Mapping[str, Verdict]]]:
        """Compare every member with the first of its class, and yield the class with the verdict."""
        for seed in self.requested.seeds:
            for each in self.requested.classes:
                command = ["andon", "falsify", str(self.requested.path), "--only", each.title, "--seed", str(seed)]
                made = [self._compared(each, member, seed, shlex.join(command)) for member in each.members[1:]]
                self.found += made
                yield each, {each.title: merge(made)}

    def report(self, unfinished: str = "", *, explained: bool = True) -> Report:
        """The results so far. A class that was not compared is unknown."""
        open_ = {each.title for each in self.requested.classes} - {each.subject for each in self.found}
        missing = [_finding(unknown(CLAIM, "it was not run"), title) for title in sorted(open_)]
        excused = {each.title: each.expected_failed for each in self.requested.classes if each.expected_failed}
        return replace(
            self.about,
            findings=(*self.found, *missing),
            runs=self.runs,
            expected=tuple(Expected(title, CLAIM.name, reason, True) for title, reason in excused.items()),
            statements={CLAIM.name: CLAIM.statement_for("script")},
            unfinished=unfinished,
        )

    def _compared(self, of: Class, member: Member, seed: int, repro: str) -> Finding:
        first, histories = of.members[0], []
        for each in (first, member):
            done = self._run(each, seed)
            if why := unusable(done):
                remedy = f"Repeat it with: {shlex.join(each.words(seed, 'run'))}"
                return _finding(unknown(CLAIM, f"{each.label}: {why}", remedy=remedy), of.title, seed)
            histories.append(replace(done.history, name=each.label))
        worlds = [history.steps[0].world or 1 for history in histories]
        numbers = _numbers(first.words(seed, ""), member.words(seed, ""), worlds)
        try:
            verdict = check_class(histories[0], histories[1], numbers, partial(self._again, first, seed))
        except RunUnavailable as error:
            verdict = unknown(CLAIM, str(error))
        examples = [
            replace(each, seed=seed, repro=repro, equals=explain_ratio(each.ratio, numbers) if each.ratio else "")
            for each in verdict.counterexamples
        ]
        return _finding(replace(verdict, counterexamples=tuple(examples)), of.title, seed, worlds[1])

    def _again(self, member: Member, seed: int, probe: str) -> History:
        if why := unusable(done := self._run(member, seed, probe)):
            raise RunUnavailable(f"{member.label}, once more: {why}")
        return done.history

    def _run(self, member: Member, seed: int, again: str | None = None) -> Done:
        key = (member.text, seed, again)
        if key not in self._done:
            with tempfile.TemporaryDirectory(prefix="andon-class-") as folder:
                self.runs += 1
                deadline = ScriptBench.late_after * self.requested.budget.deadline_s
                words = member.words(seed, new_folder(folder))
                self._done[key] = run(words, Path(folder), deadline, probe=again or UNPERTURBED)
        return self._done[key]


def _finding(verdict: Verdict, title: str, seed: int = 0, world: int = 0) -> Finding:
    place: Any = {"backend": "script" if world else "", "world": world, "accumulation": 0, "seed": seed}
    return Finding(**vars(verdict), **place, version=CLAIM.version, subject=title, subject_version="")


def _numbers(first: Sequence[str], other: Sequence[str], worlds: Sequence[int]) -> dict[str, int]:
    ours, theirs = (
        {name: int(value) for name, value in pairwise(" ".join(words).replace("=", " ").split()) if value.isdecimal()}
        for words in (first, other)
    )
    pairs = {name: (ours.get(name, 1), theirs.get(name, 1)) for name in {*ours, *theirs} if name[:1] == "-"}
    found = {name: max(pair) / max(1, min(pair)) for name, pair in pairs.items() if list(pair) != [*worlds]}
    shown = {name: name if min(pair) < 2 else f"{name} {max(pair)}/{min(pair)} =" for name, pair in pairs.items()}
    return {"world": max(worlds), **{shown[name]: int(each) for name, each in found.items() if each.is_integer()}}
