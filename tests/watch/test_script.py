"""`andon watch SCRIPT`: a script, folder or archive runs as it would alone, and what it trains is found and watched."""

from __future__ import annotations

import contextlib
import gc
import io
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from andon.run.ledger import read_ledger
from andon_contracts.act import LAUNCHER_FILES
from andon_contracts.record import Broken, End, LedgerFile, Step
from andon_contracts.watch import script
from andon_contracts.watch.opening import optimizer_of, outermost, trained_by
from tests.support.ranks import run_ranks
from tests.watch.small import sgd

pytestmark = pytest.mark.xdist_group("test_script")


@pytest.fixture(autouse=True)
def process_of_a_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`script.main` takes the process over, as is right in one that ends with the script; here tests come after it."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name, value in (("path", list(sys.path)), ("argv", list(sys.argv)), ("excepthook", sys.excepthook)):
        monkeypatch.setattr(sys, name, value)
    yield
    LAUNCHER_FILES.clear()


HEAD = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
rank, world = dist.get_rank(), dist.get_world_size()
rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
def grads(*parameters):
    for p in parameters:
        dist.all_reduce(p.grad)
def mine(step):
    return rows[4 * step : 4 * step + 4][rank::world]
def square(model, step):
    return model(mine(step)).square().mean()
def train(loss, *optimizers, reduce=lambda: None, steps=3):
    for step in range(steps):
        loss(step).backward()
        reduce()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
"""
CLIPPED = """
model = DistributedDataParallel(net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
train(lambda step: square(model, step), optimizer, reduce=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
"""
BY_HAND = """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
train(lambda step: square(model, step) / world, optimizer, reduce=lambda: grads(*model.parameters()))
"""
ADVERSARIES = """
one, other = net(1), net(2)
first = torch.optim.SGD(one.parameters(), lr=0.05)
second = torch.optim.Adam(other.parameters(), lr=0.05)
for step in range(3):
    for model, optimizer in ((one, first), (other, second)):
        train(lambda _: square(model, step) / world, optimizer, reduce=lambda: grads(*model.parameters()), steps=1)
"""
TWO_OPTIMIZERS = """
model = DistributedDataParallel(net())
first = torch.optim.SGD(model.module[2].parameters(), lr=0.05)
train(lambda step: square(model, step), first, torch.optim.Adam(model.module[0].parameters(), lr=0.05))
"""
LOOSE = """
encoder, head, scale = nn.Linear(4, 5), nn.Linear(5, 2), nn.Parameter(torch.ones(()))
for module in (encoder, head):
    for p in module.parameters():
        dist.broadcast(p.data, 0)
trained = [*head.parameters(), scale, *encoder.parameters()]
optimizer = torch.optim.SGD(trained, lr=0.05)
train(lambda step: (scale * head(encoder(mine(step)))).square().mean() / world, optimizer,
      reduce=lambda: grads(*trained))
"""
PHASES = """
model = net()
for p in model[0].parameters():
    p.requires_grad_(False)
for phase in range(2):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    train(lambda step: square(model, step) / world, optimizer, reduce=lambda: grads(*trained), steps=2)
    model.requires_grad_(True)
"""
ZERO = """
from torch.distributed.optim import ZeroRedundancyOptimizer
model = DistributedDataParallel(net())
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05)
train(lambda step: square(model, step), optimizer)
"""
CLOSURE = """
model = net()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=2)
def closure():
    optimizer.zero_grad()
    loss = model(rows[rank::world]).square().mean() / world
    loss.backward()
    grads(*model.parameters())
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total
for step in range(3):
    optimizer.step(closure)
"""
OWN_LINE = """
import andon
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with andon.watch(model, optimizer):
    model(rows).square().mean().backward()
    optimizer.step()
"""
UPDATES = {
    "clipped": (CLIPPED, [3]),
    "by hand": (BY_HAND, [3]),
    "adversaries": (ADVERSARIES, [3, 3]),
    "two optimizers": (TWO_OPTIMIZERS, [6]),
    "loose": (LOOSE, [3]),
    "phases": (PHASES, [2, 2]),
    "zero": (ZERO, [3]),
    "closure": (CLOSURE, [3]),
    "own line": (OWN_LINE, [1]),
}
"""Each script, and how many updates the ledger of each of its watches holds."""


def write_scripts(folder: Path, bodies: Mapping[str, str]) -> None:
    """Before there are ranks: none must read a file that another one is writing."""
    for name, body in bodies.items():
        (folder / f"{name}.py").write_text(HEAD + body)


def _run(arguments: Sequence[str]) -> tuple[object, str]:
    before = sys.modules["__main__"]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code: object = script.main(list(arguments))
        except SystemExit as ended:
            code = ("exit", ended.code)
    if sys.modules["__main__"] is not before:
        vars(sys.modules["__main__"]).clear()  # the next script finds no optimizer of this one
    gc.collect()
    return code, said.getvalue()


def _run_each(runs: Sequence[Sequence[str]]) -> list[tuple[object, str]]:
    return [_run(arguments) for arguments in runs]


def run_scripts(folder: Path, bodies: Mapping[str, str], *options: str) -> list[list[tuple[object, str]]]:
    """By rank and script; `{name}` in an option is that of the script."""
    write_scripts(folder, bodies)
    runs = [
        ["--action", "raise", *(each.format(name=name) for each in options), str(folder / f"{name}.py")]
        for name in bodies
    ]
    return [outcome.get() for outcome in run_ranks(2, _run_each, runs)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the scripts ran on two ranks, with their ledgers."""
    found = tmp_path_factory.mktemp("scripts")
    bodies = {name: body for name, (body, _) in UPDATES.items()}
    ranks = run_scripts(found, bodies, "--ledger", f"{found}/{{name}}.jsonl")
    first_left_out = "token weights: could not be computed in 2 of 2 updates read: "
    assert first_left_out in ranks[0][[*UPDATES].index("clipped")][1]
    return found


def ledgers(folder: Path, name: str) -> list[list[object]]:
    return [list(read_ledger(path)) for path in (folder / f"{name}.jsonl", folder / f"{name}-2.jsonl") if path.exists()]


@pytest.mark.parametrize("name", UPDATES)
def test_what_a_script_trains_is_found(folder: Path, name: str) -> None:
    """One watch for each model, whatever optimizers share in it, from the first update to the last; no false alarm."""
    found = ledgers(folder, name)
    assert [sum(isinstance(record, Step) for record in each) for each in found] == UPDATES[name][1]
    for *records, end in found:
        assert isinstance(end, End)
        assert end.reason == "finished"
        assert not any(isinstance(record, Broken) for record in records)
        indices = {record.optimizer_index for record in records if isinstance(record, Step)}
        assert indices == ({0, 1} if name == "two optimizers" else {None})


def test_the_first_update_is_seen_before_clipping(folder: Path) -> None:
    """The watch opens with the clip call: the norms are those of one process, the first one too."""
    (records,) = ledgers(folder, "clipped")
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in (record for record in records if isinstance(record, Step)):
        model(rows[4 * step.step - 4 : 4 * step.step]).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.2
        assert step.gradient_at is None
        assert step.grad_norm is not None
        assert step.grad_norm.value == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()


# how it ends


PARTED = BY_HAND.replace(", reduce=lambda: grads(*model.parameters())", "")
ENDINGS = {
    "violated": PARTED,
    "swallowed": f"try:\n{textwrap.indent(PARTED, '    ')}\nexcept Exception: pass\n",
    "warned": PARTED,
    "left": BY_HAND + "\nsys.exit(3)",
    "said": "sys.exit('words')",
    "idle": "pass",
    "argued": "assert sys.argv[1:] == ['--lr', '1', '--action'], sys.argv",
}


def test_the_exit_code_is_the_scripts_and_70_is_ours(tmp_path: Path) -> None:
    """A violation that raises ends with 70, also where the script swallowed it; a script's own exit is passed on."""
    write_scripts(tmp_path, ENDINGS)
    given = {"argued": ["--lr", "1", "--action"]}
    runs = [
        ["--action", "warn" if name == "warned" else "raise", f"{tmp_path}/{name}.py", *given.get(name, [])]
        for name in ENDINGS
    ]
    for rank, outcome in enumerate(run_ranks(2, _run_each, runs)):
        found = dict(zip(ENDINGS, outcome.get(), strict=True))
        assert [code for code, _ in found.values()] == [70, 70, 0, ("exit", 3), ("exit", "words"), 0, 0]
        assert ("andon.Violation: " in found["warned"][1]) == (rank == 0)


def _alone(path: str) -> tuple[object, str]:
    dist.barrier()  # a rank that ends before all are connected takes the others with it
    if dist.get_rank() == 1:
        return "not run", ""
    script._LONGEST_S = 0.5
    return _run(["--action", "raise", path])


def test_a_rank_that_nobody_watches_leaves_the_others_unwatched(tmp_path: Path) -> None:
    """If only some ranks were started under the watch, one line says so, and the script runs as it does alone."""
    write_scripts(tmp_path, {"alone": PARTED})
    code, said = run_ranks(2, _alone, str(tmp_path / "alone.py"))[0].get()
    assert code == 0
    assert len(said.splitlines()) == 1
    assert said.startswith(_NOT_WATCHED + "rank 1 did not come to the first update")


LOOSE_TENSOR = """
actor, temperature = net(), torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD(actor.parameters(), lr=0.05)
for step in range(3):
    train(lambda _: square(actor, step) / world, optimizer, reduce=lambda: grads(*actor.parameters()), steps=1)
    of_temperature = torch.optim.Adam([temperature], lr=0.05)  # a new one each time, as of an attack on a batch
    temperature.exp().sum().backward()
    of_temperature.step()
"""
MASTERS = """
model = net().to(torch.bfloat16)
masters = [p.detach().float().requires_grad_(True) for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=0.01)
for step in range(2):
    model(mine(step).bfloat16()).float().square().mean().backward()
    for p, m in zip(model.parameters(), masters):
        m.grad, p.grad = p.grad.float() / world, None
        dist.all_reduce(m.grad)
    optimizer.step()
    with torch.no_grad():
        for p, m in zip(model.parameters(), masters):
            p.copy_(m)
"""
ALIKE = """
one, other = net(), net()
first, second = nn.Sequential(one), nn.Sequential(one)
optimizer = torch.optim.SGD(one.parameters(), lr=0.05)
train(lambda step: square(first, step) / world, optimizer, reduce=lambda: grads(*one.parameters()))
"""
META = """
model = nn.ModuleDict({"used": net(), "unused": nn.Linear(3, 3, device="meta")})
optimizer = torch.optim.SGD(model["used"].parameters(), lr=0.05)
train(lambda step: square(model["used"], step) / world, optimizer, reduce=lambda: grads(*model["used"].parameters()))
"""
SUBGROUP = """
groups = [dist.new_group([each]) for each in range(world)]
model = DistributedDataParallel(net(rank), process_group=groups[rank])
train(lambda step: square(model, step), torch.optim.SGD(model.parameters(), lr=0.05))
"""
UNWATCHED = {
    "loose tensor": (LOOSE_TENSOR, "Adam trains only tensors that are not parameters of a module"),
    "masters": (MASTERS, "AdamW trains only tensors that are not parameters of a module"),
    "alike": (ALIKE, "2 identical modules of type Sequential hold the optimizer's parameters"),
    "meta": (META, "unused.weight, unused.bias are on the meta device"),
    "subgroup": (SUBGROUP, "the group has 2 ranks, but the model's DDP group has 1"),
}
"""Right scripts that cannot be watched, or not wholly, and what is said of them."""


_NOT_WATCHED = "andon watch: an optimizer is not watched, and the script goes on: "


def test_what_cannot_be_watched_ends_no_script(tmp_path: Path) -> None:
    """It runs to its end; one line in all, of one of the ranks, says what is not watched and why."""
    ranks = run_scripts(tmp_path, {name: body for name, (body, _) in UNWATCHED.items()})
    for place, (name, (_, why)) in enumerate(UNWATCHED.items()):
        assert [rank[place][0] for rank in ranks] == [0, 0], (name, ranks)
        lines = [line for rank in ranks for line in rank[place][1].splitlines()]
        told = [line for line in lines if line.startswith(_NOT_WATCHED)]
        assert len(told) == 1, (name, ranks)
        assert why in told[0]
        assert any("andon.watch: 3 steps" in line for line in lines) == (name == "loose tensor")
        assert not any(_IDLE in line for line in lines)


def test_a_ledger_that_cannot_be_written_is_still_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop.py").write_text(_ONE + OWN_LINE.replace("import andon\n", "").replace(_WITH, "if True:"))
    (tmp_path / "notes.txt").write_text("no ledger\n")
    monkeypatch.setenv("ANDON_LEDGER", str(tmp_path / "notes.txt"))
    code, said = _run([str(tmp_path / "loop.py")])
    assert code == ("exit", 2)
    assert "is not a ledger" in said
    with contextlib.closing(LedgerFile(tmp_path / "run.jsonl", exclusive=True)) as file:
        file.append(End(0, "finished", {}, None, 0))
    monkeypatch.setenv("ANDON_LEDGER", str(tmp_path / "run.jsonl"))
    assert _run([str(tmp_path / "loop.py")])[1].endswith("already contains another run; name another file\n")


_WITH = "with andon.watch(model, optimizer):"
_ONE = "from torch import nn\nimport torch\ndef net(): return nn.Linear(4, 2)\nrows = torch.ones(3, 4)\n"
_IDLE = "nothing was watched"


@pytest.mark.parametrize(
    ("body", "idle", "code"),
    [(_ONE + OWN_LINE, False, 0), ("pass", True, 0), ("import sys; sys.exit(0)", True, ("exit", 0))],
)
def test_nothing_was_watched_only_if_no_watch_was_opened(body: str, idle: bool, code: object, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(body)
    found, said = _run([str(tmp_path / "loop.py")])
    assert (found, "andon.watch: 1 step," in said, _IDLE in said) == (code, not idle, idle)


@pytest.mark.parametrize("world", ["", "1", "2"])
def test_ranks_of_a_launcher_that_made_no_group_are_warned(
    world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trains apart and is one process to its watch; the exit code is the script's all the same.

    The finding at the close names no line: the script has ended, and the command that ran it is none of the user's.
    """
    monkeypatch.setenv("WORLD_SIZE", world)
    (tmp_path / "plain.py").write_text(_ONE + OWN_LINE.replace("import andon\n", "").replace(_WITH, "for _ in (1, 2):"))
    code, said = _run([str(tmp_path / "plain.py")])
    closed = "\nandon.Violation: ranks-joined broken after step 2"
    assert (code, closed in said) == (0, world == "2")


FAILING = """
import sys, os
assert __name__ == "__main__" and sys.argv == [__file__, "--x"], sys.argv
assert sys.path[0] == os.path.dirname(os.path.abspath(__file__)), sys.path[0]
print([name for name in ("transformers", "peft", "hypothesis", "pydantic", "click") if name in sys.modules])
import beside
def fail():
    try:
        {}["first"]
    except KeyError:
        raise RuntimeError("second")
fail()
"""


def test_errors_look_as_they_would_alone(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    (tmp_path / "beside.py").touch()
    alone, watched = (
        subprocess.run(
            [sys.executable, *how, str(tmp_path / "script.py"), "--x"], capture_output=True, text=True, check=False
        )
        for how in ([], ["-m", "andon_contracts.watch", "--action", "raise"])
    )
    assert (watched.stdout, watched.stderr) == (alone.stdout, alone.stderr)
    assert watched.returncode == alone.returncode == 1
    assert "RuntimeError: second" in watched.stderr
    assert watched.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name the script to run"),
        (["nothing.py"], "can't open file 'nothing.py'"),
        (["--allow", "replicas-agre=x", __file__], "did you mean 'replicas-agree'"),
        (["--allow", "replicas-agree", __file__], "has no reason: write --allow replicas-agree=REASON"),
        (["--clip", "1.0", __file__], "--clip is not an option but an argument of andon.watch(...)"),
        (["--action", "cry", __file__], "invalid choice"),
        (["{}/empty.zip"], "can't find '__main__' module in '{}/empty.zip'\n"),
        (["{}"], "can't find '__main__' module in '{}'\n"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(arguments: list[str], said: str, tmp_path: Path) -> None:
    zipfile.ZipFile(tmp_path / "empty.zip", "w").close()
    code, told = _run([each.format(tmp_path) for each in arguments])
    assert code == ("exit", 2)
    assert said.format(tmp_path) in told


# folders and archives


PROGRAM = """
import sys, torch, beside
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print(__name__, sys.argv, sys.path[0], beside.__file__)
"""


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_or_an_archive_runs_as_python_runs_it(
    tmp_path: Path, packed: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `__main__`, with its own modules, arguments and path, and each update is watched."""
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").write_text(PROGRAM)
    (tmp_path / "program" / "beside.py").touch()
    path = str(tmp_path / "program")
    if packed:
        path = shutil.make_archive(path, "zip", path)
    monkeypatch.setitem(sys.modules, "beside", None)
    monkeypatch.delitem(sys.modules, "beside")
    assert script.main([path, "--x"]) == 0
    said = capsys.readouterr()
    assert said.out == f"__main__ {[path, '--x']} {path} {path}/beside.py\n"
    assert "andon.watch: 2 steps" in said.err


# what nothing tells apart


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module, name: str = "model") -> None:
        super().__init__()
        self.add_module(name, model)


def test_of_two_optimizers_that_nothing_tells_apart_none_is_guessed() -> None:
    """An older one of the same kind may still be there on one rank only: which one is used, its update says."""
    gc.collect()
    model = nn.Linear(2, 2)
    one = sgd(model)
    assert optimizer_of(model.parameters()) is one
    two = sgd(model)
    assert optimizer_of(model.parameters()) is None
    for optimizer in (one, two):
        assert trained_by(optimizer) == (model, [optimizer])
    both = nn.Sequential(nn.Linear(2, 2), model)
    assert trained_by(sgd(both[0]))[1][1:] == []


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_modules_the_names_decide_and_not_who_was_made_first(order: int) -> None:
    model = nn.Linear(2, 2)
    gc.collect()
    made = {name: Wrapped(model, name) for name in ("b", "a")[::order]}
    assert outermost(model) is made["a"]
    assert trained_by(sgd(model))[0] is made["a"]


@pytest.mark.parametrize("find", [outermost, lambda model: trained_by(sgd(model))])
def test_two_modules_that_nothing_tells_apart_are_refused_in_words(find: Callable[[nn.Module], object]) -> None:
    model = nn.Linear(2, 2)
    gc.collect()
    made = [Wrapped(model), Wrapped(model)]
    with pytest.raises(ValueError, match=r"2 identical modules of type Wrapped .* the one to watch to andon\.watch"):
        find(model)
    assert len(made) == 2
