"""A resumed run, held to what the run before it left in the ledger: weights, optimizer, rate, rows, random streams."""

from __future__ import annotations

import ctypes
import json
import math
import random
import sys
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from andon_contracts.agree import real_of
from andon_contracts.digest import hex64, mix64
from andon_contracts.laws.law import Law, Observations, in_lockstep
from andon_contracts.legible import log, log_once
from andon_contracts.observe import Observer, plain
from andon_contracts.record import LedgerError, Resume, Start, Step, read_lines
from andon_contracts.violation import Finding, first_line
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.checks.mode import Mode
from andon_contracts.watch.checks.optimizer import OptimizerState
from andon_contracts.watch.checks.rows import LoadedRows
from andon_contracts.watch.intercept import LoaderPass, is_running
from andon_contracts.watch.values import text_digest

_STREAMS = tuple(f"random stream of {name}" for name in ("torch", "numpy", "Python"))
_SLACK, _MOST = 2, 4096
"""The updates whose rows a pass may have too few or too many, for padding; the updates of a pass that are sent."""
_NO_PASS: Mapping[str, Any] = {"rows": {}, "used": 0, "size": 0, "slack": 0.0}
"""The unfinished pass: steps by rows, rows so far, all rows, and by how many rows the count may be off."""
_NOTHING: Mapping[str, Any] = {"problems": (), "step": 0, "same ranks": False, "rates": {}, **_NO_PASS}
"""What rank 0 finds in the ledger: problems, the step that the run resumes from, rates by step, an unfinished pass."""
_LIKELY = "a part of the state was not saved, not loaded, or made anew after the load; another run needs another ledger"
_EXACT = (Law[Finding | None]("resume-exact/watched", (), lambda found: found, suspicion=True),)


class Left(NamedTuple):
    """A step in the ledger: its number, learning rate, number of ranks, and digests and numbers by name."""

    step: int
    rate: float
    world: int
    values: Mapping[str, str]


class ResumedRun(Check):
    """Compares the first update of a process with the steps that an earlier process left in the same ledger.

    A loop does not say that it resumes, and not from where. So digests decide: the step that left the weights (else the
    optimizer state) of this update is the one that the process resumes from. The weights with which the earlier run
    began mean that the run is made again, unless optimizer state, `start=` or rows are of a later step: then they were
    not loaded. Without such a step one line says so, and nothing more is judged. Steps continue the earlier numbers.

    The invariant: a value is compared only with what was written for the same point of an update. A checkpoint may be
    taken after any step, and no call shows when. So each update writes what a resume needs. Weights, optimizer state
    and rate are read anyway. The rows of all ranks are one sum, for any number of ranks. The digests of random streams
    take about 0.1 ms of the host. Rank 0 reads the ledger, and all ranks get the result before they number the update,
    because ranks with different numbers would not be at the same point.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._began: dict[str, str] = {}
        self._passes: weakref.WeakSet[LoaderPass] = weakref.WeakSet()
        self._first: LoaderPass | None = None
        """The first pass of this process. A resumed loop may have thrown away the `_skipped` rows that came first."""
        self._skipped = self._total = 0
        self._left = _NOTHING

    def cover(self) -> Mapping[str, Cover]:
        return {"resume-exact": Cover("live", "if the ledger has steps of an earlier process")}

    def meet(self, probe: OptimizerProbe) -> None:
        """Just before the first update of `probe`: find the step that it resumes from, and judge it. Collective."""
        context, state, step = self.context, OptimizerState(probe.optimizer, probe.members), probe.updates
        state.observer.portable = context.portable
        weights = Observer(portable=context.portable).look(probe.members)
        own = {"weights": weights.digest, "optimizer": state.look().digest, **self._streams(), **self._rows()}
        said = context.exchange(step + 1, "resumed", own, judged=True)
        if not in_lockstep(said):
            return
        now = {name: context.recorder.whole([o.values[name] for o in said]) for name in ("weights", "optimizer")}
        self._began = {f"{name} before": digest for name, digest in now.items()}
        found: Mapping[str, Any] = {}
        if context.exchange.rank == 0:
            try:
                found, before = self._compare(probe, now | _written(said)), context.recorder.earlier
                if before and not (found or step):
                    log_once(str(before), f"andon.watch: the run in {before} is not continued; this one begins anew")
            except (OSError, LedgerError) as error:
                log(f"andon.watch: the ledger cannot be read, so a resume is not checked: {first_line(error)}")
        self._left = {**_NOTHING, **json.loads(context.exchange.gather_texts(step + 1, json.dumps(found))[0])}
        if self._left["step"] and not step:
            probe.updates = self._left["step"]
            context.settings = replace(context.settings, start=probe.updates)
            context.recorder.loaded(probe.updates, "the loop's own", context.world, [probe.optimizer])

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        window = [each for each in self.context.check(LoadedRows).window if not each.source.unclear]
        first, reached = self._first, 0
        if window and first is None:
            self._first = first = window[0].source
            self._skipped = window[0].so_far - len(window[0].ids or ()) if self._left["step"] else 0
        self._passes.update(batch.source for batch in window)
        if window and sum(map(is_running, self._passes)) <= 1:
            reached = window[-1].so_far - (self._skipped if window[-1].source is first else 0)
        values = {"in pass": reached, "pass over": first.rows - self._skipped if first and first.finished else 0}
        return {**values, **self._rows(), **self._streams()}

    def _rows(self) -> Values:
        parts = [batch.ids for batch in self.context.check(LoadedRows).window]
        ids = [row for part in parts for row in part or ()] if None not in parts else []
        return {"used": len(ids), "used rows": int(mix64(torch.tensor(ids, dtype=torch.int64, device="cpu")).sum())}

    def _streams(self) -> Values:
        numpy, state = sys.modules.get("numpy"), self.context.check(Mode).random_state()
        of_torch = 0 if state is None else zlib.crc32(ctypes.string_at(state.data_ptr(), state.nbytes))
        bits: Any = getattr(getattr(numpy, "random", None), "get_bit_generator", lambda: None)()
        # In memory: 624 words and the position. Numpy takes 20 times as long to give them.
        raw = ctypes.string_at(bits.ctypes.state_address, 2500) if type(bits).__name__ == "MT19937" else b""
        return dict(zip(_STREAMS, (of_torch, zlib.crc32(raw), hash(random.getstate()[1]) >> 2), strict=True))

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        step, ended, counts = said[0].step, [o.values["pass over"] for o in said], [o.values["in pass"] for o in said]
        left, rate, written = self._left, real_of(said[0].values["rate"]), _written(said)
        if step == left["step"] + 1 and not all(counts):  # how the pass goes on is not known
            left = {**left, "rows": {}, "used": 0}
        problems, used = [*left["problems"]], sum(o.values["used"] for o in said)
        same = [int(number) for number, each in left["rates"].items() if math.isclose(each, rate)]
        if same and not {step, left["step"]} & {*same} and (str(step) in left["rates"] or step - left["step"] in same):
            unless = ", unless its schedule has cycles" * (str(step) not in left["rates"])
            problems.append(f"the learning rate {rate:.4g} is that of step {same[0]}{unless}")
        if left["used"] and left["size"] and all(ended):
            extra = left["used"] + sum(ended) - left["size"]
            what = f"used about {extra} rows again" if extra > 0 else f"left out about {-extra} rows"
            what = f"the pass over {left['size']} rows that went on after {left['used']} of them {what}"
            problems += [what] * (abs(extra) > left["slack"])
        total = sum(counts) if all(counts) else 0
        if all(ended) or total < self._total:  # a new pass over the data
            left = {**left, "rows": {}, "used": 0}
        earlier, due = left["rows"].get(written.get("rows", "")), step in left["rows"].values()
        if earlier not in (None, step):
            what = "came again" if earlier < step else "came too early, so that rows are skipped,"
            problems.append(f"the rows of step {earlier} {what} in the same pass over the data")
        elif earlier is None and due and left["same ranks"] and used * _SLACK == left["slack"]:
            problems.append(f"the rows are not those that step {step} had in the same pass over the data")
        # Two updates show a schedule that begins anew: the optimizer may still hold the rate of the first.
        over = {"same ranks": False, "rates": {}} if step > left["step"] + 1 else {}
        self._left, self._total, position = {**left, "problems": (), **over}, total or self._total, dict[str, str]()
        if total:
            source = self.context.check(LoadedRows).window[-1].source
            size = source.length * self.context.world
            size = left["size"] if left["used"] else source.size if abs(size - source.size) <= used else size
            position = {"in pass": str(left["used"] + total), "of": str(size)}
        self.context.recorder.left, self._began = {**self._began, **written, **position}, {}
        if problems or left["step"]:
            what = f"the run does not continue what its ledger holds: {'; '.join(problems)}"
            found = Finding(what, step, likely=_LIKELY) if problems else None
            self.context.verdicts.judge(_EXACT, found, self.context.scene())

    def _compare(self, probe: OptimizerProbe, now: Mapping[str, str]) -> dict[str, Any]:
        """On rank 0: the step that `probe` resumes from, the problems, and the unfinished pass. {}: it is no resume."""
        context, problems, told = self.context, list[str](), list[str]()
        index = probe.number if len(context.probes) > 1 else None
        trained, steps = read_steps(context.recorder.earlier, index)
        if not steps:
            return {}

        def place_of(name: str) -> int | None:
            same = (at for at, each in enumerate(steps) if each.values.get(name) == now.get(name, ""))
            return max(same, default=None)

        first, names = steps[0].values, context.recorder.trained()
        began, empty = (now[name] == first.get(f"{name} before") for name in ("weights", "optimizer"))
        of_weights, of_state = place_of("weights"), None if empty else place_of("optimizer")
        of_start = next((at for at, each in enumerate(steps) if each.step == probe.updates), None)
        # The rows of a later step show that the loop goes on from the step before.
        of_rows = place_of("rows") if now.get("rows") != first.get("rows") else None
        # An update at rate 0 leaves the weights of the step before.
        both = of_state if of_state is not None and steps[of_state].values["weights"] == now["weights"] else None
        places = (both, None if began else of_weights, of_state, of_start, of_rows and of_rows - 1)
        place = next((at for at in places if at is not None), None)
        if began and place is None:
            return {}
        for what, only in (("lost", trained.keys() - names), ("new", names.keys() - trained if trained else ())):
            if only:
                problems.append(f"{len(only)} trained tensors are {what} ({min(only)}{', ...' * (len(only) > 1)})")
        left = steps[-1 if place is None else place]
        where = "an unknown step" if place is None else f"step {left.step}"
        reshaped = context.subject.sharded and left.world != context.world
        other = "in other shards" if reshaped else _other_form(probe, names, trained)
        if began and left.values["weights"] != now["weights"]:
            problems.append("the weights are those of the start of the run, so they were not loaded")
        elif of_weights is None and (other or place is None):
            told.append(f"its weights are {other or 'of no step'}")
        elif of_weights is None:
            problems.append(f"the weights are not those that {where} left")
        differs = place is not None and not reshaped and now["optimizer"] != left.values["optimizer"]
        if differs and (empty or not any(map(probe.optimizer.state.get, probe.members))):
            problems.append(f"the optimizer state of {where} is lost and begins anew")
        elif differs and of_state is not None:
            problems.append(f"the optimizer state is that of step {steps[of_state].step}")
        elif differs:
            told.append("its optimizer state has other bits")
        if any(each.source.unclear for each in context.check(LoadedRows).window):
            told.append("which batches it left out is not known, so rows are not compared")
        if left.world != context.world:
            told.append(f"it ran on {left.world} ranks, so random streams are not compared")
        elif place is not None:
            # The stream moves at each update, and is now at a position that it had before the resume.
            for name in filter(now.__contains__, _STREAMS):
                values = [each.values.get(name) for each in steps]
                until, after = values[: place + 1], values[place + 1 :]
                moves = len(until) > 1 and all(one != other for one, other in pairwise(until))
                if moves and now[name] in until and now[name] not in after:
                    again = f"draws the numbers of step {steps[until.index(now[name])].step} again"
                    problems.append(f"the {name} {again}: it was not restored, or seeded after the restore")
                    break
                if now[name] != next(iter(after), now[name]):
                    told.append(f"the {name} is not that of step {steps[place + 1].step}, so it draws other numbers")
        log("; ".join([f"andon.watch: the run goes on from {where} of {context.recorder.earlier}", *told]))
        if place is None or index is not None:
            return {"problems": problems}
        # The rates of the steps around it, and of the first two unless the schedule has cycles.
        of_first = [math.isclose(each.rate, steps[0].rate) for each in steps]
        cycles = any(later and not each for each, later in pairwise(of_first))
        near = {*range(max(place - 1, 0), place + 3)} | (set() if cycles else {0, 1})
        rates = {str(steps[at].step): steps[at].rate for at in sorted(near) if at < len(steps)}
        found = {"problems": problems, "step": left.step, "same ranks": left.world == context.world, "rates": rates}
        return {**found, **_unfinished_pass(steps, place)}


def _written(said: Observations) -> dict[str, str]:
    columns = {name: [o.values[name] for o in said] for name in ("used", "used rows", *_STREAMS)}
    rows = {"rows": hex64(sum(columns["used rows"]))} if all(columns["used"]) else {}
    return {**rows, **{name: hex64(text_digest(columns[name])) for name in _STREAMS if any(columns[name])}}


def _other_form(probe: OptimizerProbe, names: Mapping[str, str], trained: Mapping[str, str]) -> str:
    """How weights may rightly have other bits: in another dtype, or rounded to 16 bits by a checkpoint; "" if not."""
    if any(trained.get(name, form) != form for name, form in names.items()):
        return "of another dtype or shape"
    wide = [plain(p) for p in probe.members if p.is_floating_point() and p.dtype.itemsize > 2]
    rounded = (d for d in (torch.bfloat16, torch.float16) if wide and all(bool((p == p.to(d)).all()) for p in wide))
    return next((f"rounded to {dtype}" for dtype in rounded), "")


def _unfinished_pass(steps: Sequence[Left], place: int) -> dict[str, Any]:
    """What `_NO_PASS` lists of the pass that the step at `place` left unfinished. {}: it is over, or not known."""
    used, size = [int(each.values.get("in pass", 0)) for each in steps], int(steps[place].values.get("of", 0))
    passes = list(accumulate(int(now <= before) for before, now in pairwise([0, *used])))
    part = [each for each, number in zip(steps, passes, strict=True) if number == passes[place]]
    per_update = used[place] / (1 + part.index(steps[place]))
    # If the ledger does not show how the pass continues, it may be over.
    if not used[place] or (part[-1] is steps[place] and (place + 1 < len(steps) or used[place] + per_update > size)):
        return {}
    rows = {each.values["rows"]: each.step for each in part[-_MOST:] if "rows" in each.values}
    return {"rows": rows, "used": used[place], "size": size, "slack": _SLACK * per_update}


def read_steps(path: Path | None, index: int | None) -> tuple[Mapping[str, str], list[Left]]:
    """The trained tensors, and the steps in the ledger at `path` of optimizer `index` that no resume took back."""
    steps, trained, kept = list[Left](), dict[str, str](), math.inf
    for record, _ in read_lines(path) if path is not None else ():
        if isinstance(record, Start):
            trained = dict(record.tensors or {})
        elif isinstance(record, Resume):
            kept = record.step
        elif isinstance(record, Step) and record.optimizer_index == index:
            # A resume that makes no step takes none back.
            steps, kept = [each for each in steps if each.step <= kept] if kept < math.inf else steps, math.inf
            digests = {name: digest or "" for name, digest in vars(record.digests).items()}
            steps.append(Left(record.step, record.lr.value, record.world, {**digests, **(record.state or {})}))
    return trained, steps
