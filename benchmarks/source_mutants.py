"""Do the tests notice a small change in the sources? `python -m benchmarks.source_mutants --count 300 --seed 1`.

The program draws places from the syntax trees of the three packages (an operator, a comparison, a small constant, a
condition, a `not`). It changes one place at a time in a copy of the checkout and runs the tests most likely to notice:
first the test files that import the changed module, then those that import its importers, up to 12 files and
`--seconds`. A failing test counts only if it passes without the change. The default tier runs; `--deep` adds the deep
tier. A surviving mutant does not prove a gap: some changes have no visible effect.

    killed    a test failed, and it passes without the change
    survived  every test passed
    timeout   the time ran out before any test failed

`--results FILE` stores one line of JSON per mutant; a second call skips the mutants in that file. `--jobs N` tries N
mutants in parallel, each in its own copy. `--in TREE` mutates another checkout.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.runs import table

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"andon_contracts": "contracts", "andon": "core", "andon_falsify": "falsify"}
"""Each package and its folder in a checkout."""
KILLED, SURVIVED, TIMEOUT = "killed", "survived", "timeout"

_SWAPS: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_LARGEST = 16
"""Constants up to this size are steps, counts and bounds. Larger ones are mostly masks and table entries."""
_TEST_FILES, _PER_TEST_S = 12, 120

Function = ast.FunctionDef | ast.AsyncFunctionDef
Place = tuple[ast.expr | ast.stmt, ast.AST]
"""A node that can be changed, and its replacement."""
Trial = dict[str, Any]
"""The fields of a `Site`, its id, and what the tests said: a line of `--results`."""


@dataclass(frozen=True)
class Site:
    """A place that can be changed.

    name: of its function within the module (`Class.method`). body: a digest of the function's tree. place: index into
    `places(function)`. was, becomes: the source text before and after.
    """

    name: str
    body: str
    place: int
    path: str
    line: int
    was: str
    becomes: str

    @property
    def id(self) -> str:
        """Independent of the file and line of the function."""
        return f"{self.name} {self.body} {self.place}"


# Where something can be changed


def body_digest(function: Function) -> str:
    """12 hex digits over a function's tree, without its position, docstring, annotations and comments."""
    bare = copy.deepcopy(function)
    for node in ast.walk(bare):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    return hashlib.sha256(ast.dump(bare).encode()).hexdigest()[:12]


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if not any("jit" in ast.unparse(decorator) for decorator in child.decorator_list):  # for GPUs alone
                    yield f"{prefix}{child.name}", child
            elif isinstance(child, ast.ClassDef):
                yield from below(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.If | ast.Try):
                yield from below(child, prefix)

    yield from below(tree, "")


def changed(node: ast.AST) -> ast.AST | None:
    new = copy.deepcopy(node)
    if isinstance(new, ast.BinOp | ast.BoolOp | ast.AugAssign):
        if type(new.op) not in _SWAPS or (isinstance(node, ast.BinOp) and _is_text(node)):
            return None
        new.op = _SWAPS[type(new.op)]()  # type: ignore[assignment]
        return new
    if isinstance(new, ast.Compare):
        new.ops[0] = _SWAPS[type(new.ops[0])]()  # type: ignore[call-overload]
        return new
    if isinstance(new, ast.Constant):
        if isinstance(new.value, bool):
            new.value = not new.value
        elif isinstance(new.value, int) and abs(new.value) <= _LARGEST:
            new.value += 1
        else:
            return None
        return new
    if isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        return new.operand
    return None


def _is_text(node: ast.BinOp) -> bool:
    texts = (ast.JoinedStr, ast.List, ast.Tuple)
    sides = (node.left, node.right)
    return any(
        isinstance(side, texts) or (isinstance(side, ast.Constant) and isinstance(side.value, str)) for side in sides
    )


def places(function: Function) -> Iterator[Place]:
    """The places of a function's body, in an order that depends on its tree alone."""

    def below(node: ast.AST) -> Iterator[Place]:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_comment", "decorator_list"):
                continue  # never executed, or a contract's condition
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                    yield from at(child)

    def at(node: ast.AST) -> Iterator[Place]:
        new = changed(node)
        if new is not None and isinstance(node, ast.expr | ast.stmt):
            yield node, new
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        yield from below(node)

    yield from below(function)


def sample(root: Path, count: int, seed: int) -> list[Site]:
    """`count` places of `root`, drawn from `seed`.

    Each place is ranked by a hash of its id, so two checkouts share the places of all unchanged functions. Left out are
    functions with the same name and tree as another, and the loops that are wrong on purpose.
    """
    found: dict[str, Site | None] = {}
    for path in (path for package, folder in PACKAGES.items() for path in (root / folder / package).rglob("*.py")):
        if "peers" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        for name, function in functions(ast.parse(text)):
            body, where = body_digest(function), str(path.relative_to(root))
            for place, (node, new) in enumerate(places(function)):
                first, last = _span(text, node)
                was = " ".join(text.encode()[first:last].decode().split())
                site = Site(name, body, place, where, node.lineno, was, ast.unparse(new))
                found[site.id] = None if site.id in found else site
    sites = [site for site in found.values() if site is not None]
    return sorted(sites, key=lambda site: hashlib.sha256(f"{seed} {site.id}".encode()).digest())[:count]


def _span(text: str, node: ast.expr | ast.stmt) -> tuple[int, int]:
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def mutated(text: str, site: Site) -> str:
    """The module with the change made and every other byte as it was. Raises `LookupError` for another module."""
    for name, function in functions(ast.parse(text)):
        if (name, body_digest(function)) == (site.name, site.body):
            node, new = list(places(function))[site.place]
            first, last = _span(text, node)
            put = ast.unparse(new) if isinstance(node, ast.stmt) else f"({ast.unparse(new)})"
            return (text.encode()[:first] + put.encode() + text.encode()[last:]).decode()
    raise LookupError(f"{site.name} is not in this module")


# Which tests are most likely to notice


class Imports:
    def __init__(self, root: Path) -> None:
        self._root = root
        files = [*(root / "tests").rglob("*.py"), *(root / "falsify").glob("*.py")]
        files += [path for folder in PACKAGES.values() for path in (root / folder).rglob("*.py")]
        self._file = {self._name(path): path for path in files}
        self._by: dict[str, set[str]] = {}
        for name, path in self._file.items():
            for imported in self._imported(ast.parse(path.read_text(encoding="utf-8"))):
                self._by.setdefault(imported, set()).add(name)

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self._root).with_suffix("").parts
        within = parts[1:] if parts[0] in PACKAGES.values() and len(parts) > 2 else parts
        return ".".join(within).removesuffix(".__init__")

    def _imported(self, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (each.name for each in node.names if each.name in self._file)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for each in node.names:
                    whole = f"{node.module}.{each.name}"
                    yield whole if whole in self._file else node.module

    def tests_of(self, path: str) -> list[str]:
        """The test files nearest to the module at `path`, nearest first; among equally near ones the smallest first."""
        start = self._name(self._root / path)
        near, seen, found = {start}, {start}, []
        while near and len(found) < _TEST_FILES:
            tests = [self._file[name] for name in near if name.rpartition(".")[2].startswith("test_")]
            tests = [file for file in tests if file.name != "test_subject.py"]  # it needs --subject
            found += sorted(tests, key=lambda file: (start.rpartition(".")[2] not in file.stem, file.stat().st_size))
            near = {by for name in near for by in self._by.get(name, ())} - seen
            seen |= near
        return [str(file.relative_to(self._root)) for file in found[:_TEST_FILES]]


# Trying them


class Bench:
    """A copy of the tracked files of `root` in `folder`, in which mutants are tried one at a time."""

    def __init__(self, root: Path, folder: Path, seconds: float, deep: bool) -> None:
        listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True).stdout
        self.folder = folder
        for name in listed.splitlines():
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        self._imports = Imports(folder)
        # An empty expression selects both tiers; it replaces `-m "not deep"` of pyproject.toml.
        self._seconds, self._tier = seconds, ["-m", ""] if deep else []
        paths = [*(str(folder / each) for each in PACKAGES.values()), *filter(None, [os.environ.get("PYTHONPATH")])]
        # A coverage run of this process would otherwise record the copy's files, which do not exist when it reports.
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE_", "COV_"))}
        self._environment = {
            **plain,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONPYCACHEPREFIX": str(folder / ".pycache"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HYPOTHESIS_PROFILE": "ci",
        }
        _install(folder)

    def check(self) -> None:
        """Raise if pytest does not start: it would fail with and without a change, and every mutant seem to survive."""
        words = [sys.executable, "-m", "pytest", "--rootdir=.", "--markers"]
        subprocess.run(words, cwd=self.folder, env=self._environment, stdout=subprocess.DEVNULL, check=True)

    def attempt(self, site: Site) -> Trial:
        path = self.folder / site.path
        whole = path.read_text(encoding="utf-8")
        tests = self._imports.tests_of(site.path)
        # tests/ and falsify/ each parametrize `backend` in their own way, so one process cannot collect both.
        left = [each for top in ("tests/", "falsify/") if (each := [test for test in tests if test.startswith(top)])]
        began, outcome, failed = time.monotonic(), SURVIVED, ""
        while left:
            path.write_text(mutated(whole, site), encoding="utf-8")
            try:
                outcome, failed = self._run(left[0], self._seconds - (time.monotonic() - began))
            finally:
                path.write_text(whole, encoding="utf-8")
            if outcome == TIMEOUT or (outcome == KILLED and self._run([failed], self._seconds)[0] == SURVIVED):
                break
            # All passed; or the failed test fails without the change too, for example under load: leave out its file.
            file, outcome = failed.partition("::")[0], SURVIVED
            rest = [test for test in left[0] if test != file] if file in left[0] else []
            left, failed = [rest] * bool(rest) + left[1:], ""
        seconds = round(time.monotonic() - began, 1)
        said = {"outcome": outcome, "test": failed, "files": len(tests), "seconds": seconds}
        return {"id": site.id, **asdict(site), **said}

    def _run(self, tests: Sequence[str], seconds: float) -> tuple[str, str]:
        """The outcome of these tests, and the first that failed. A file with an import error counts as failed."""
        words = [sys.executable, "-m", "pytest", "--rootdir=.", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
        words += ["-rfE", f"--timeout={_PER_TEST_S}", *self._tier, *tests]
        with tempfile.TemporaryFile("w+") as said:
            running = subprocess.Popen(
                words, cwd=self.folder, env=self._environment, stdout=said, stderr=said, start_new_session=True
            )
            try:
                code = running.wait(max(seconds, 1.0))
            except subprocess.TimeoutExpired:
                return TIMEOUT, ""
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
                running.wait()
            said.seek(0)
            text = said.read()
        if code in (0, 5):  # 5: no test was collected
            return SURVIVED, ""
        named = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", text, re.MULTILINE)  # without parameters: they hold spaces
        # Without a summary the mutant or pytest-timeout ended the process: take the file that was running.
        return KILLED, named[1] if named else next((test for test in tests if test in text), tests[0])


def _install(folder: Path) -> None:
    """Put the copy's entry points before those of an installed Andon, which may be of another version."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project.get("version", "0.0")  # tests look for it in messages
    described = folder / "contracts" / f"andon-{version}.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: andon\nVersion: {version}\n", encoding="utf-8")
    lines = []
    for group, entries in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (described / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def try_all(drawn: Sequence[Site], benches: Sequence[Bench], results: Path, until: float) -> list[Trial]:
    """Try each mutant that `results` lacks, one at a time per bench, and begin none after `until`. Returns the trials
    of `drawn`, earlier ones included."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    known = {trial["id"]: trial for trial in map(json.loads, lines)}
    left = iter([site for site in drawn if site.id not in known])
    lock = threading.Lock()

    def work(bench: Bench) -> None:
        while True:
            with lock:
                site = next(left, None) if time.monotonic() < until else None
            if site is None:
                return
            trial = bench.attempt(site)
            with lock, results.open("a", encoding="utf-8") as file:
                known[site.id] = trial
                file.write(json.dumps(trial) + "\n")
                print(*row(trial), sep="  ", flush=True)

    with ThreadPoolExecutor(len(benches)) as pool:
        list(pool.map(work, benches))  # raises the error of any bench
    return [known[site.id] for site in drawn if site.id in known]


def row(trial: Trial) -> tuple[object, ...]:
    where, change = "{path}:{line} {name}".format(**trial), "`{was}` -> `{becomes}`".format(**trial)
    return where, change, trial["outcome"], trial["test"], f"{trial['seconds']:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="size of the sample")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--in", dest="root", type=Path, default=ROOT, help="the checkout to mutate; default: this one")
    parser.add_argument("--first", type=int, help="try only this many mutants of the sample")
    parser.add_argument("--results", type=Path, default=Path("source-mutants.jsonl"), help="file for the results")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit for the tests of a mutant")
    parser.add_argument("--deep", action="store_true", help="run the deep tier of the tests as well")
    parser.add_argument("--jobs", type=int, default=1, help="mutants in parallel")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="start no mutant after this many seconds")
    options = parser.parse_args()
    root, until = options.root.resolve(), time.monotonic() + options.deadline
    drawn = sample(root, options.count, options.seed)[: options.first]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copies = [Path(folder) / str(job) for job in range(options.jobs)]
        benches = [Bench(root, copy, options.seconds, options.deep) for copy in copies]
        benches[0].check()
        found = try_all(drawn, benches, options.results, until)
    print(table(("where", "change", "outcome", "by", "s"), map(row, found)))
    counts = Counter(trial["outcome"] for trial in found)
    words = ", ".join(f"{counts[outcome]} {outcome}" for outcome in (KILLED, SURVIVED, TIMEOUT))
    share, seconds = counts[KILLED] / max(len(found), 1), sum(trial["seconds"] for trial in found)
    each = f"{seconds / max(len(found), 1):.0f} s each"
    print(f"{words} of {len(found)} ({share:.0%} killed), {len(drawn)} drawn; {each}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
