"""All texts that users may read: `python -m tests.support.messages` writes them to tests/golden/messages.txt."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from andon_contracts.clauses import CLAUSES
from tests.repository.sources import PACKAGES, ROOT

SNAPSHOT = ROOT / "tests" / "golden" / "messages.txt"
_PROSE = re.compile(r"(?=.*\b[a-z]{2}).*\w\W* \W*\w.* \W*\w")  # three words; a placeholder counts as one


def snapshot() -> str:
    """Every clause; then by module every text of three words or more outside docstrings, f-strings as templates."""
    lines = [line for clause in CLAUSES.values() for line in (clause.name, *clause.explanation())]
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            texts = sorted(set(_prose(ast.parse(path.read_text(encoding="utf-8")))))
            lines += ["", path.relative_to(ROOT / folder).as_posix(), *texts] if texts else []
    return "\n".join(lines) + "\n"


def _prose(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr | ast.Constant):
        text = _text(node).replace("\n", "\\n")
        if _PROSE.match(re.sub(r"\{[^}]*\}", "x", text)):
            yield text
    elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # a docstring
        types = (getattr(node, "annotation", None), getattr(node, "returns", None))
        for child in ast.iter_child_nodes(node):
            yield from () if child in types else _prose(child)


def _text(node: ast.AST) -> str:
    """The text of a string. A placeholder shows names and texts only: `ast.unparse` depends on Python's version."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.Name | ast.Attribute):
        return node.id if isinstance(node, ast.Name) else node.attr
    inside = filter(None, map(_text, ast.iter_child_nodes(node)))
    text = ("" if isinstance(node, ast.JoinedStr) else " ").join(inside)
    return f"{{{text}}}" if isinstance(node, ast.FormattedValue) else text


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
