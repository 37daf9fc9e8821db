"""No folder or file of a model, adapter or checkpoint runs code: every place that has a library read one says so."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.repository.sources import ROOT

LOADERS = ("from_pretrained", "from_config")
PICKLES = ("pickle.load", "pickle.loads", "torch.load", "joblib.load", "dill.load", "marshal.loads")
FOLDERS = ("contracts", "core", "falsify", "examples", "benchmarks")


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call of the sources, with its place."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def of_transformers(call: ast.Call) -> bool:
    """Whether an `Auto...` class of transformers, or one chosen as `auto`, loads here: those that a folder can tell to
    import a file of its."""
    target = call.func
    if not isinstance(target, ast.Attribute) or target.attr not in LOADERS:
        return False
    return isinstance(target.value, ast.Name) and target.value.id.lower().startswith("auto")


def trusting(call: ast.Call) -> bool:
    """Whether it is not told, in so many words, to trust nothing."""
    told = [word.value for word in call.keywords if word.arg == "trust_remote_code"]
    return [value.value for value in told if isinstance(value, ast.Constant)] != [False]


def test_every_loader_is_told_to_trust_no_code() -> None:
    """`trust_remote_code=False` stands at each: without it transformers asks, and a yes runs what is in the folder."""
    found = {place: call for place, call in calls() if of_transformers(call)}
    assert len([place for place in found if place.startswith("core/")]) >= 5
    assert [place for place, call in found.items() if trusting(call)] == []


def test_nothing_is_unpickled() -> None:
    """By what ships: a message of our own processes goes through multiprocessing, all else through JSON and tensors."""
    found = [place for place, call in calls() if ast.unparse(call.func) in PICKLES]
    assert [place for place in found if place.startswith(("contracts/", "core/"))] == []


def starts_python(node: ast.expr) -> bool:
    """Whether this is a command (a list or tuple of words) that starts this interpreter."""
    words = node.elts if isinstance(node, ast.List | ast.Tuple) else []
    return any(ast.unparse(word) == "sys.executable" for word in words)


def test_every_python_process_is_started_in_one_way() -> None:
    """`module_command` keeps the current folder off the path of what ships; no other place builds such a command."""
    shipped = [path for part in ("contracts", "core", "falsify/andon_falsify") for path in (ROOT / part).rglob("*.py")]
    found = [
        path
        for path in shipped
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.expr) and starts_python(node)
    ]
    assert found == [ROOT / "core/andon/launch/interpreter.py"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("AutoModel.from_pretrained(x)", True),
        ("auto.from_pretrained(x)", True),
        ("AutoModel.from_pretrained(x, trust_remote_code=True)", True),
        ("AutoModel.from_config(x, trust_remote_code=wanted)", True),
        ("AutoModel.from_config(x, trust_remote_code=False)", False),
    ],
)
def test_a_trusting_call_is_seen(text: str, expected: bool) -> None:
    """The test above would see one."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert of_transformers(call)
    assert trusting(call) is expected
