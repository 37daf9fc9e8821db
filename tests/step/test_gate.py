"""What the device finds of a table is what the host finds of it: the gate closes exactly where a law is broken."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon.config.schema import Optimizer
from andon.step.agreement import Gathered
from andon.step.flat import moments_of
from andon.step.message import (
    COMPUTED,
    REDUCED,
    REPORT,
    Field,
    Gate,
    Message,
    encoded,
    expected_computed,
    most,
    padded,
    reduced_values,
    reports_of,
    state_values,
    updated,
)
from andon_contracts.agree import bits_of, header, majority, real_of
from andon_contracts.digest import signed
from andon_contracts.laws import update as laws
from andon_contracts.laws.law import LOCKSTEP, Judgement, Law, Rule, Seen, agreeing, rules_of
from andon_contracts.laws.update import LeafPlan, Leaves, Reduced, clipped_norm
from tests.support.toy import CPU

STEP, SEQUENCE, POINT = 6, 3, "here"
worlds = st.integers(1, 4)
UPDATED = (LOCKSTEP, laws.ONE_UPDATE, laws.OPTIMIZERS, laws.REPLICAS)
Rows = Sequence[Sequence[int]]


def gathered(values: Rows, names: Sequence[str], data: st.DataObject) -> Gathered:
    heads = [header(rank, STEP, SEQUENCE, POINT, names) for rank in range(len(values))]
    own = data.draw(st.integers(0, len(values) - 1))
    stray = data.draw(st.integers(0, 3 * len(values)))
    if stray < len(values) and stray != own:
        heads[stray][data.draw(st.integers(0, len(heads[0]) - 1))] += data.draw(st.sampled_from([-1, 1]))
    table = torch.tensor([[*head, *map(signed, row)] for head, row in zip(heads, values, strict=True)])
    return Gathered(STEP, SEQUENCE, POINT, tuple(names), table, table.shape[1])


def closes(said: Gathered, rows: Rows, held: int = 0, want: Reduced | None = None) -> bool:
    heads = [header(rank, STEP, SEQUENCE, POINT, said.names) for rank in range(len(rows))]
    gate = Gate([CPU])
    expected = encoded([[*head, *row] for head, row in zip(heads, rows, strict=True)])
    gate.look(said.table, torch.tensor(expected), torch.tensor(signed(held)), want)
    return bool(gate.closed)


def changed(values: list[list[int]], pools: Sequence[Sequence[int]], column: int | None, data: st.DataObject) -> None:
    """Give a rank another value in `column`, and perhaps one elsewhere: more would hide whether the gate sees each."""
    places = st.tuples(st.integers(0, len(values) - 1), st.integers(0, len(pools) - 1))
    where = [] if column is None else [(data.draw(st.integers(0, len(values) - 1)), column)]
    for rank, place in where + data.draw(st.lists(places, max_size=1)):
        values[rank][place] = data.draw(st.sampled_from(pools[place]))


# the points


REPORTED = [*range(len(REPORT.names)), *COMPUTED.names, "missing", "surplus", ""]


@pytest.mark.parametrize("odd", REPORTED)
@given(world=worlds, data=st.data())
def test_of_what_was_computed(odd: int | str, world: int, data: st.DataObject) -> None:
    counts = [data.draw(st.integers(0, 3)) for _ in range(world)]
    owners = [rank for rank, count in enumerate(counts) for _ in range(count)]
    plan = [
        LeafPlan(index, rank, tuple(range(index % 3)), 5 - index, 2 * (index % 3)) for index, rank in enumerate(owners)
    ]
    finite, bad = bits_of(0.5), [bits_of(math.nan), bits_of(-math.inf)]
    reports = [[leaf.index, len(leaf.ids), finite, 1, leaf.terms, finite, leaf.content, 4] for leaf in plan]
    if reports:
        column = odd if isinstance(odd, int) else None
        changed(reports, [[0, 9], [0, 7], bad, [0, 2], [0, 1], bad, [0, 99], [0, 5]], column, data)
    known = [[0, 0, 0, -7] for _ in range(world)]
    column = COMPUTED.names.index(odd) if isinstance(odd, str) and odd in COMPUTED.names else None
    changed(known, [[1], [1], [1], [8]], column, data)
    at = data.draw(st.integers(0, world - 1))
    most_rows, values = max(counts) + 1, []
    for rank in range(world):
        own = [report for report, leaf in zip(reports, plan, strict=True) if leaf.rank == rank]
        if rank == at:
            own = own[:-1] if odd == "missing" else own + own[:1] if odd == "surplus" else own
        table = torch.tensor(own, dtype=torch.int64).view(-1, len(REPORT.names))
        values.append([*known[rank], *padded(table, most_rows).flatten().tolist()])
    said = gathered(values, COMPUTED.names, data)
    rows = expected_computed(plan, world, most_rows, checked=True)
    observations = said.observations(said.table)
    found = Judgement((LOCKSTEP, *laws.PLANNED), Seen(observations, None)).first is not None
    found = found or any(each.values["failed"] for each in observations)
    found = found or Judgement(laws.LEAVES, Leaves(reports_of(observations), plan, STEP)).first is not None
    assert closes(said, rows) == found


@pytest.mark.parametrize("column", [None, *range(len(REDUCED.names))])
@given(
    world=worlds,
    limit=st.sampled_from([None, 0.0, 1e-6, 0.5, 3.0]),
    near=st.sampled_from([1e-6, 1e-4, 1e-2]),
    first=st.booleans(),
    data=st.data(),
)
def test_of_what_was_reduced(
    column: int | None, world: int, limit: float | None, near: float, first: bool, data: st.DataObject
) -> None:
    norm = data.draw(st.sampled_from([0.0, 1e-6, 0.3, 2.0, 3e38, math.inf]))
    rate, other, held = bits_of(0.1), bits_of(0.2), 7
    left = clipped_norm(norm, limit)
    values = [[rate, rate, 11, 0, held, bits_of(norm), bits_of(left)] for _ in range(world)]
    norms = [norm, 4.0, math.nan]
    lefts = [left * factor for factor in (1 + 0.9 * near, 1 + 1.1 * near, 0.5, math.nan)] + [clipped_norm(4.0, limit)]
    pools = [[other], [other], [12], [1], [8], [*map(bits_of, norms)], [*map(bits_of, lefts)]]
    changed(values, pools, column, data)
    said = gathered(values, REDUCED.names, data)
    weights = reduced_values(9, {"gradient": 0, "weights": held})["weights"]
    observations = [replace(each, values=reduced_values(9, each.values)) for each in said.observations(said.table)]
    judgement = Judgement(
        laws.REDUCED, Seen(observations, Reduced(Rule.SAME if first else weights, limit, norm_tolerance=near))
    )
    want = Reduced(Rule.SAME if first else Rule.PREVIOUS, limit, norm_tolerance=near)
    assert closes(said, [REDUCED.expected(want)] * world, held, want) == (judgement.first is not None)


def _count_bits(updates: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", updates))[0])


SPECS = [Optimizer(), Optimizer(name="sgd", momentum=0.9)]


@pytest.mark.parametrize("column", [None, 0, 1, 2])
@given(world=worlds, spec=st.sampled_from(SPECS), due=st.integers(1, 99), data=st.data())
def test_of_what_the_update_left(
    column: int | None, world: int, spec: Optimizer, due: int, data: st.DataObject
) -> None:
    moments = [3 + place for place, _ in enumerate(moments_of(spec))]
    values = [[5, *moments, _count_bits(due)] for _ in range(world)]
    counts = [_count_bits(count) for count in (due - 1, due + 0.5, 0.0, -1.0, math.nan, math.inf)]
    changed(values, [[6], *([0, 9] for _ in moments), counts], column, data)
    said = gathered(values, updated(spec).names, data)
    observations = [replace(each, values=state_values(spec, 9, each.values)) for each in said.observations(said.table)]
    judgement = Judgement(UPDATED, Seen(observations, due))
    assert closes(said, [updated(spec).expected(due)] * world) == (judgement.first is not None)


def test_every_row_that_may_be_judged_late_has_a_form_for_the_device() -> None:
    assert set(rules_of(laws.REDUCED, Reduced())) == {"rate", "weights", "gradient", "nonfinite", "norm", "clipped"}
    assert rules_of(UPDATED, 4) == {"updates": 4, "optimizer": Rule.SAME, "weights": Rule.SAME}
    fields = (*COMPUTED.fields, *REPORT.fields, *REDUCED.fields, *updated(Optimizer()).fields)
    late = (*laws.PLANNED, *laws.LEAVES, *laws.REDUCED, *UPDATED)
    assert {field.law for field in fields} - {None} == {law for law in late if law is not LOCKSTEP}
    with pytest.raises(ValueError, match="rate must stand beside planned"):
        Message("here", (Field("x", "host"), Field("rate", "host", laws.RATE, beside="planned")))
    with pytest.raises(ValueError, match="base-frozen/base cannot be checked on a device"):
        rules_of((laws.FROZEN,), 3)


@pytest.mark.parametrize("turned", [False, True])
def test_one_rule_for_one_value(turned: bool) -> None:
    def law(rule: int) -> Law[Seen[object]]:
        return replace(agreeing("trees-agree/here", ("x",), ""), device=lambda _: {"x": rule})

    def both(*rules: int) -> int:
        return rules_of([law(rule) for rule in (reversed(rules) if turned else rules)], None)["x"]

    assert both(5, Rule.SAME) == 5
    assert both(Rule.PREVIOUS, Rule.SAME) is Rule.PREVIOUS
    assert both(5, 5) == 5
    for pair in [(5, 6), (Rule.FINITE, Rule.SAME), (5, Rule.PREVIOUS), (Rule.SAME.value, Rule.FINITE)]:
        with pytest.raises(ValueError, match="the rules for x conflict"):
            both(*pair)


# the rules


@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=7))
def test_most_is_the_majority_of_each_column(table: Rows) -> None:
    columns = list(zip(*table, strict=True))
    assert most(torch.tensor(table)).tolist() == [[majority(column) for column in columns]]
    assert all(Counter(column)[majority(column)] == max(Counter(column).values()) for column in columns)


@given(st.integers(1, 3), st.integers(0, 6), st.integers(0, 2), st.sampled_from(Rule), st.data())
def test_each_rule_sees_its_own(world: int, column: int, rank: int, rule: Rule, data: st.DataObject) -> None:
    table = torch.zeros((world, 7), dtype=torch.int64)
    rows: list[list[int]] = [[0] * 7 for _ in range(world)]
    for row in rows:
        row[column] = rule
    rank = min(rank, world - 1)
    value = data.draw(st.sampled_from([0, 1, -1, bits_of(1.5), bits_of(math.inf), bits_of(-math.nan)]))
    table[rank, column] = value
    odd = {
        Rule.ANY: False,
        Rule.SAME: world > 1 and value != 0,
        Rule.FINITE: not math.isfinite(real_of(value)),
        Rule.PREVIOUS: value != 0 or world > 1,
        Rule.MAJORITY: value != 0,
        Rule.CLIPPED: not abs(real_of(value)) <= 1e-30,
    }[rule]
    held = torch.tensor(value if rule == Rule.PREVIOUS and world == 1 else 0)
    if rule == Rule.PREVIOUS:
        odd = bool((table[:, column] != held).any())
    gate = Gate([CPU])
    gate.look(table, torch.tensor(encoded(rows)), held, Reduced())
    assert bool(gate.closed) == odd
    gate.open()
    rows[rank][(column + 1) % 7] = 5
    gate.look(table, torch.tensor(encoded(rows)), held, Reduced())
    assert gate.closed
