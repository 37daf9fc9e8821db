"""Checkers of a record's numbers and links: each accepts a good history, and rejects the smallest bad one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon_falsify.checkers import (
    chain_intact,
    loss_finite,
    schedule,
)
from andon_falsify.history import History, read_lines
from andon_falsify.verdict import Outcome
from tests.falsify.notation import history, says

HOLDS, FALSIFIED, UNKNOWN, INAPPLICABLE = Outcome.HOLDS, Outcome.FALSIFIED, Outcome.UNKNOWN, Outcome.NOT_APPLICABLE


def test_chain_intact() -> None:
    says(chain_intact.check(history("start | 1: 0[a] | resume step=1 | 2: 0[b]")), HOLDS)
    says(chain_intact.check(history("start | 1: 0[a] | torn")), HOLDS, "line 2 was cut short")
    says(chain_intact.check(history("")), UNKNOWN)


def lines_of(text: str) -> list[bytes]:
    import json

    return [json.dumps(event.fields).encode() + b"\n" for event in history(text).events]


def as_history(lines: list[bytes]) -> History:
    return read_lines(lines, "x")


def test_chain_intact_rejects_every_way_to_tamper() -> None:
    lines = lines_of("start | 1: 0[a] | 2: 0[b] | 3: 0[c] | end")
    says(chain_intact.check(as_history(lines)), HOLDS)
    changed = [lines[0], lines[1].replace(b'"epoch": 0', b'"epoch": 1'), *lines[2:]]
    assert changed != lines
    says(chain_intact.check(as_history(changed)), FALSIFIED, "line 3: it does not follow")
    says(chain_intact.check(as_history(lines[1:])), FALSIFIED, "line 1: it does not follow", "seq 0, seen seq 1")
    says(chain_intact.check(as_history([*lines[:2], *lines[3:]])), FALSIFIED, "line 3", "expected seq 2, seen seq 3")
    says(chain_intact.check(as_history([lines[0], lines[2], lines[1], *lines[3:]])), FALSIFIED)
    says(chain_intact.check(as_history([*lines[:2], lines[1], *lines[2:]])), FALSIFIED, "seen seq 1")
    says(chain_intact.check(history("start | garbage | 1: 0[a]")), FALSIFIED, "line 2: unreadable: not JSON")
    says(chain_intact.check(history("start | 1: 0[a] | torn | 2: 0[b]")), FALSIFIED, "line 2: unreadable")
    says(chain_intact.check(history("start | garbage")), FALSIFIED, "line 2: unreadable")


def test_chain_intact_rejects_a_line_without_a_number() -> None:
    says(chain_intact.check(as_history([b'{"v":1,"kind":"end","prev":"%s"}\n' % (b"0" * 16)])), FALSIFIED, "seq None")


@given(st.integers(0, 4), st.data())
def test_chain_intact_rejects_any_changed_byte(line: int, data: st.DataObject) -> None:
    lines = lines_of("start | 1: 0[a] | 2: 0[b] | 3: 0[c] | end | end")
    place = data.draw(st.integers(0, len(lines[line]) - 2))
    byte = data.draw(st.integers(32, 126).filter(lambda value: value != lines[line][place]))
    lines[line] = lines[line][:place] + bytes([byte]) + lines[line][place + 1 :]
    says(chain_intact.check(as_history(lines)), FALSIFIED)


def test_loss_finite() -> None:
    says(loss_finite.check(history("1: 0[a] loss=0.5 norm=1e30")), HOLDS)
    says(loss_finite.check(history("1: 0[a] | 2: 0[b] loss=nan")), FALSIFIED, "step 2: the loss", "seen nan")
    says(loss_finite.check(history("1: 0[a] norm=-inf")), FALSIFIED, "step 1: the gradient norm", "seen -inf")
    says(loss_finite.check(history("end")), UNKNOWN)
    read = read_lines([b'{"v":1,"kind":"step","step":1,"grad_norm":1.0}\n'], "x")
    says(loss_finite.check(read), UNKNOWN, "step 1 records no loss")


def test_a_loop_that_tells_no_loss_is_judged_by_its_norms() -> None:
    """A watch may know no loss at all; of the trainer, or where some updates have one, silence is unknown."""
    lines = [
        b'{"v":2,"kind":"start","writer":"watch"}\n',
        b'{"v":2,"kind":"step","step":1,"grad_norm":1.0}\n',
        b'{"v":2,"kind":"step","step":2,"grad_norm":2.0}\n',
    ]
    says(loss_finite.check(read_lines(lines, "x")), HOLDS, "gradient norms only")
    says(loss_finite.check(read_lines(lines[1:], "x")), UNKNOWN, "step 1 records no loss")
    lines[2] = lines[2].replace(b"2.0}", b'2.0,"loss":0.5}')
    says(loss_finite.check(read_lines(lines, "x")), UNKNOWN, "step 1 records no loss")
    lines[2] = b'{"v":2,"kind":"step","step":2,"grad_norm":{"value":null,"hex":"inf"}}\n'
    says(loss_finite.check(read_lines(lines, "x")), FALSIFIED, "step 2: the gradient norm")


LAW = schedule.WarmupCosine(peak=1.0, total=10, fraction=0.2, minimum=0.1)


def test_the_closed_form_of_the_schedule() -> None:
    assert [LAW(1), LAW(2)] == [0.5, 1.0]
    assert LAW(6) == pytest.approx(0.55, rel=1e-15)
    assert [LAW(10), LAW(11)] == pytest.approx([0.1, 0.1], rel=1e-15)
    assert schedule.WarmupCosine(1.0, 2, 1.0)(3) == 0.0
    assert schedule.WarmupCosine(1.0, 4, 0.0, 2.0)(4) == 1.0


@given(st.integers(1, 200), st.floats(0.0, 1.0), st.floats(1e-6, 1.0), st.floats(0.0, 1.0))
def test_the_schedule_rises_then_falls(total: int, fraction: float, peak: float, low: float) -> None:
    law = schedule.WarmupCosine(peak, total, fraction, low * peak)
    rates = [law(step) for step in range(1, total + 1)]
    top = int(fraction * total)
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert all(rate <= peak * (1 + 1e-15) for rate in rates)
    assert all(rate >= low * peak * (1 - 1e-12) for rate in rates[top:])


def rates(law: schedule.Schedule, steps: range) -> str:
    return " | ".join(f"{step}: 0[a] lr={law(step)!r}" for step in steps)


def test_schedule() -> None:
    says(schedule.check(history(rates(LAW, range(1, 11))), LAW), HOLDS)
    says(schedule.check(history(f"1: 0[a] lr={0.5 * (1 + 1e-9)!r}"), LAW), FALSIFIED, "step 1")
    says(schedule.check(history(f"1: 0[a] lr={0.5 * (1 + 1e-9)!r}"), LAW, tolerance=1e-8), HOLDS)
    says(schedule.check(history("1: 0[a] lr=nan"), LAW), FALSIFIED, "seen nan")


def test_schedule_names_whose_rate_it_is() -> None:
    """Advanced once a micro-batch (F61), restarted on resume (F77): the rate is another step's."""

    def doubled(step: int) -> float:
        return LAW(2 * step)

    says(
        schedule.check(history(rates(doubled, range(3, 5))), LAW),
        FALSIFIED,
        "step 3: the learning rate",
        "that of step 6",
    )
    restarted = f"{rates(LAW, range(1, 4))} | resume step=3 | 4: 0[a] lr={LAW(1)!r}"
    says(schedule.check(history(restarted), LAW), FALSIFIED, "step 4", "it is that of step 1;")
    says(schedule.check(history("1: 0[a] lr=7"), LAW), FALSIFIED, "off the schedule; expected")


def test_schedule_infers_nothing_without_a_law_or_rates() -> None:
    says(schedule.check(history("1: 0[a]"), None), INAPPLICABLE)
    says(schedule.check(history(""), LAW), UNKNOWN)
    says(schedule.check(read_lines([b'{"v":1,"kind":"step","step":1}\n'], "x"), LAW), UNKNOWN, "no learning rate")
