"""Do the tests see a small change anywhere in the sources? `python -m benchmarks.source_mutants --count 300 --seed 1`.

Draws places from the syntax trees of the three packages (an operator, a comparison, a small constant, a condition, a
`not`), changes one at a time in a copy of the checkout, and runs the tests that are most likely to see it: those that
import the changed module first, then those that import what imports it, up to `--files` test files and `--seconds`.
The checkout itself is not changed. A test that fails counts only if it passes on the copy without the change.
The default tier of the tests runs; with `--deep` the deep tier runs too.

    killed    a test failed, which passes without the change
    survived  all of these tests passed
    timeout   the time was over while they ran, and none had failed

`--also TREE` draws only from functions that another checkout has too, with the same name and body in any file, so that
the samples of both are the same and their killed shares can be compared. `--in TREE` tries the mutants there.
`--results FILE` keeps a line of JSON for each mutant, and a second call goes on after it. `--jobs N` tries N at a time,
each in its own copy. A survivor does not prove a gap in the tests: some changes have no effect that can be seen.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.runs import table

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"andon_contracts": "contracts", "andon": "core", "andon_falsify": "falsify"}
"""Each package, and the folder of a checkout that holds it."""
KILLED, SURVIVED, TIMEOUT = "killed", "survived", "timeout"

_SWAPS: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_LARGEST = 16
"""Constants up to this are small: a step, a count, a bound. Larger ones are mostly masks and table entries."""
_PER_TEST_S = 120

Function = ast.FunctionDef | ast.AsyncFunctionDef
Key = tuple[str, str]
"""A function whatever its file: its name within the module (`Class.method`), and a digest of its tree."""


@dataclass(frozen=True)
class Site:
    """A place that can be changed.

    name, body: see `Key`. place: which of the function's places it is, in the order of `places`. path: of its file in
    the checkout, and line: in that file. was, becomes: the source text there, before and after.
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
        """The same for the same change in the same function, wherever that stands."""
        return f"{self.name} {self.body} {self.place}"


@dataclass(frozen=True)
class Trial:
    id: str
    name: str
    path: str
    line: int
    was: str
    becomes: str
    outcome: str
    test: str
    files: int
    seconds: float

    def row(self) -> tuple[object, ...]:
        changed = f"`{self.was}` -> `{self.becomes}`"
        return f"{self.path}:{self.line} {self.name}", changed, self.outcome, self.test, f"{self.seconds:.0f}"


# Where something can be changed


def body_digest(function: Function) -> str:
    """12 digits over the tree of a function: not its place, docstring, annotations or comments."""
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


def places(function: Function) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    """Every node of a function's body that can be changed, with what it becomes, in an order that is its own."""

    def below(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_comment", "decorator_list"):
                continue  # nothing that runs, or a condition with functions of its own
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                    yield from at(child)

    def at(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
        new = changed(node)
        if new is not None and isinstance(node, ast.expr | ast.stmt):
            yield node, new
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        yield from below(node)

    yield from below(function)


def sites(root: Path) -> dict[Key, list[Site]]:
    found: dict[Key, list[Site]] = {}
    twice: set[Key] = set()
    for path in product_files(root):
        text = path.read_text(encoding="utf-8")
        for name, function in functions(ast.parse(text)):
            key = (name, body_digest(function))
            if key in found:
                twice.add(key)
            found[key] = [
                Site(*key, place, str(path.relative_to(root)), node.lineno, _at(text, node), ast.unparse(new))
                for place, (node, new) in enumerate(places(function))
            ]
    return {key: listed for key, listed in found.items() if key not in twice}


def product_files(root: Path) -> Iterator[Path]:
    """The modules of the three packages; the loops and faults that are there to be wrong are left out."""
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder / package).rglob("*.py")):
            if not {"faults", "peers", "nemesis", "fuzz"} & set(path.parts):
                yield path


def sample(root: Path, other: Path | None, count: int, seed: int) -> list[Site]:
    """`count` places of `root` drawn from `seed`; only of functions that `other` has as well, where it is given.

    Each place has a rank of its own, so that the sample of two checkouts stays what it was, in whatever files the
    functions stand, but for those that only one of them has by now.
    """
    here = sites(root)
    both = set(here) & set(sites(other)) if other is not None else set(here)
    found = [site for key in both for site in here[key]]
    return sorted(found, key=lambda site: hashlib.sha256(f"{seed} {site.id}".encode()).digest())[:count]


def _span(text: str, node: ast.expr | ast.stmt) -> tuple[int, int]:
    lines = text.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def _at(text: str, node: ast.expr | ast.stmt) -> str:
    first, last = _span(text, node)
    return " ".join(text.encode()[first:last].decode().split())


def mutated(text: str, site: Site) -> str:
    """The module with the change made, all else to the byte as it was. Raises `LookupError` for another module."""
    for name, function in functions(ast.parse(text)):
        if (name, body_digest(function)) == (site.name, site.body):
            node, new = list(places(function))[site.place]
            first, last = _span(text, node)
            plain = ast.unparse(new)
            data = text.encode()
            put = plain if isinstance(node, ast.stmt) else f"({plain})"
            return (data[:first] + put.encode() + data[last:]).decode()
    raise LookupError(f"{site.name} is not in this module")


# Which tests are most likely to see it


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

    def tests_of(self, path: str, most: int) -> list[str]:
        """Up to `most` test files, the nearest to the module at `path` first; of equally near the smallest first."""
        start = self._name(self._root / path)
        near, seen, found = {start}, {start}, []
        while near and len(found) < most:
            tests = [self._file[name] for name in near if name.rpartition(".")[2].startswith("test_")]
            found += sorted(tests, key=lambda file: (start.rpartition(".")[2] not in file.stem, file.stat().st_size))
            near = {by for name in near for by in self._by.get(name, ())} - seen
            seen |= near
        return [str(file.relative_to(self._root)) for file in found[:most]]


# Trying them


class Bench:
    def __init__(self, root: Path, folder: Path, files: int, seconds: float, deep: bool = False) -> None:
        listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True).stdout
        self.folder = folder
        for name in listed.splitlines():
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        self._imports = Imports(folder)
        self._files, self._seconds, self._tier = files, seconds, ["-m", ""] if deep else []
        paths = [*(str(folder / each) for each in PACKAGES.values()), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Whoever measures this process has no use for what a copy executes, whose files are gone when it reports.
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
        # With a plugin that it cannot load pytest fails with and without a change, as if every mutant survived.
        words = [sys.executable, "-m", "pytest", "--rootdir=.", "--markers"]
        subprocess.run(words, cwd=folder, env=self._environment, stdout=subprocess.DEVNULL, check=True)

    def attempt(self, site: Site) -> Trial:
        path = self.folder / site.path
        whole = path.read_text(encoding="utf-8")
        tests = self._imports.tests_of(site.path, self._files)
        began = time.monotonic()
        outcome, failed = SURVIVED, ""
        left = tests
        while left:
            path.write_text(mutated(whole, site), encoding="utf-8")
            try:
                outcome, failed = self._run(left, self._seconds - (time.monotonic() - began))
            finally:
                path.write_text(whole, encoding="utf-8")
            if outcome != KILLED or self._run([failed], _PER_TEST_S)[0] == SURVIVED:
                break
            # It fails without the change too, beside other work for instance: the rest is asked without its file.
            left = left[left.index(failed.partition("::")[0]) + 1 :] if failed.partition("::")[0] in left else []
            outcome, failed = SURVIVED, ""
        seconds = time.monotonic() - began
        known = asdict(site)
        return Trial(
            site.id, outcome=outcome, test=failed, files=len(tests), seconds=round(seconds, 1),
            **{name: known[name] for name in ("name", "path", "line", "was", "becomes")},
        )  # fmt: skip

    def _run(self, tests: Sequence[str], seconds: float) -> tuple[str, str]:
        """How these tests end: the outcome, and the first that failed; a file that cannot be imported is one too."""
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
                _end(running)
            said.seek(0)
            text = said.read()
        if code == 0 or code == 5:  # 5: no test was collected
            return SURVIVED, ""
        named = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        if named is not None:
            return KILLED, named[1]
        # The mutant ended the process, or pytest-timeout did: the file that was running is named.
        return KILLED, next((test for test in tests if test in text), tests[0])


def _install(folder: Path) -> None:
    """Have the copy's entry points found before those of an Andon that is installed, which may be of another state."""
    known = folder / "pyproject.toml"
    read = tomllib.loads(known.read_text(encoding="utf-8")) if known.is_file() else {}
    project = read.get("project", {})
    version = project.get("version", "0.0")  # tests look for it in what is said
    described = folder / "contracts" / f"andon-{version}.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: andon\nVersion: {version}\n", encoding="utf-8")
    lines = []
    for group, entries in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (described / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def tried(results: Path) -> dict[str, Trial]:
    if not results.is_file():
        return {}
    found = [Trial(**json.loads(line)) for line in results.read_text(encoding="utf-8").splitlines()]
    return {trial.id: trial for trial in found}


def account(trials: Sequence[Trial], planned: int) -> str:
    counts = Counter(trial.outcome for trial in trials)
    share = counts[KILLED] / max(len(trials), 1)
    words = ", ".join(f"{counts[outcome]} {outcome}" for outcome in (KILLED, SURVIVED, TIMEOUT))
    each = sum(trial.seconds for trial in trials) / max(len(trials), 1)
    return f"{words} of {len(trials)} ({share:.0%} killed), {planned} drawn; {each:.0f} s each"


def try_all(drawn: Sequence[Site], benches: Sequence[Bench], results: Path, begin: Callable[[], bool]) -> list[Trial]:
    """Each mutant that no earlier call tried, as long as `begin` says so; all that is known afterwards, in order.

    As many at a time as there are benches, of which each has one.
    """
    known = tried(results)
    left = iter([site for site in drawn if site.id not in known])
    writing = threading.Lock()

    def work(bench: Bench) -> None:
        while True:
            with writing:
                site = next(left, None) if begin() else None
            if site is None:
                return
            trial = bench.attempt(site)
            with writing, results.open("a", encoding="utf-8") as lines:
                known[site.id] = trial
                lines.write(json.dumps(asdict(trial)) + "\n")
                print(*trial.row(), sep="  ", flush=True)

    with ThreadPoolExecutor(len(benches)) as pool:
        for _ in pool.map(work, benches):  # so that an error of one is raised
            pass
    return [known[site.id] for site in drawn if site.id in known]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--in", dest="root", type=Path, default=ROOT, help="the checkout to try them on; this one")
    parser.add_argument("--also", type=Path, help="another checkout: only functions that it has too")
    parser.add_argument("--first", type=int, help="only the first so many of the sample")
    parser.add_argument("--results", type=Path, default=Path("source-mutants.jsonl"), help="where to keep them")
    parser.add_argument("--files", type=int, default=12, help="test files of a mutant at most")
    parser.add_argument("--seconds", type=float, default=300.0, help="for the tests of a mutant")
    parser.add_argument("--deep", action="store_true", help="run the deep tier of the tests too")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which none is begun")
    parser.add_argument("--list", action="store_true", help="print the sample and try nothing")
    options = parser.parse_args()
    drawn = sample(options.root.resolve(), options.also, options.count, options.seed)[: options.first]
    if options.list:
        print(*(f"{site.path}:{site.line} {site.name}: {site.was} -> {site.becomes}" for site in drawn), sep="\n")
        return 0
    until = time.monotonic() + options.deadline
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copies = [Path(folder) / str(job) for job in range(options.jobs)]
        root, files, seconds = options.root.resolve(), options.files, options.seconds
        benches = [Bench(root, each, files, seconds, options.deep) for each in copies]
        found = try_all(drawn, benches, options.results, lambda: time.monotonic() < until)
    print(table(("where", "change", "outcome", "by", "s"), [trial.row() for trial in found]))
    print(account(found, len(drawn)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
