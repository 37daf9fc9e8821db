"""The rules of style that depend on the table's columns: its width, and its filters, which need no script."""

from __future__ import annotations

from andon_falsify.report.cells import Mark

CLASSES = {
    Mark.FALSIFIED: "falsified",
    Mark.EXPECTED: "expected",
    Mark.PASSED: "passed",
    Mark.UNKNOWN: "unknown",
    Mark.HOLDS: "holds",
    Mark.NOT_APPLICABLE: "inapplicable",
}
"""The class, and the symbol, of each mark."""


_FEW = 4


def width_rule(subjects: int) -> str:
    """Columns stay wide enough to be read and narrow enough to be compared; statements have what room is left."""
    first = 30 if subjects <= _FEW else 18
    return (
        f"@media screen {{\n  :root {{ --first: {first}rem }}\n"
        f"  .matrix {{ min-width: calc(min(var(--first), 45vw) + {8.5 * subjects}rem) }}\n"
        f"  .frame {{ max-width: {first + 20 * subjects}rem }}\n}}\n"
    )


def filter_rules(subjects: int) -> str:
    """Columns whose box is not ticked are hidden, cells of such marks too, and rows of which nothing is left.

    The boxes are `#show-s0` for the first subject and `#show-holds` for a mark. A browser that does not know `:has`
    shows the whole table and no boxes.
    """
    rules = [f"main:has(#show-s{column}:not(:checked)) .s{column} {{ display: none }}" for column in range(subjects)]
    rules += [
        f"main:has(#show-{name}:not(:checked)) td.{name} > * {{ visibility: hidden }}" for name in CLASSES.values()
    ]
    rules.append(".matrix tbody tr { display: none }")
    shown = [
        f"main:has(#show-s{column}:checked):has(#show-{name}:checked) .matrix tbody tr:has(td.s{column}.{name})"
        for column in range(subjects)
        for name in CLASSES.values()
    ]
    if shown:
        rules.append(f"{', '.join(shown)} {{ display: table-row }}")
    inside = "\n".join(f"  {rule}" for rule in rules)
    return f"@media screen {{ @supports selector(:has(*)) {{\n{inside}\n}} }}\n"
