"""Where two runs part, and what else differs between them: run folders, ledgers or configurations.

Bits of different machines or versions are not comparable: a difference there is reported, and is never called wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from andon.config.identity import NAMING, by_dotted_key, config_digest, differences, identity
from andon.config.load import load_config
from andon.config.schema import Config
from andon.inspection.recorded import Recorded, open_recorded
from andon.run.provenance import read_provenance
from andon.run.repeats import REPEATED, Difference, lacks, shown
from andon.training.existing import config_of
from andon_contracts.record import Start

_HARDWARE = ("machine", "cpu", "instructions", "threads", "devices")
_DIGITS = 64
"""Of a SHA-256."""
_SHOWN = 160
_EMBEDDED = frozenset({"data.embedded", "model.embedded"})
"""Settings that follow from the names."""


class Comparison(Enum):
    """The outcome of a comparison; the value is the exit code."""

    SAME = 0
    DIFFERENT = 1
    INCOMPARABLE = 2


@dataclass
class Differences:
    """Lines for a reader, and the result."""

    lines: list[str] = field(default_factory=list)
    result: Comparison = Comparison.SAME

    def add(self, part: str, what: str) -> None:
        """Add one line under the heading `part`."""
        self.lines.append(f"{part:<9} {what}")


@dataclass(frozen=True)
class Side:
    """A run, or the configuration of one. `settings`: None for a ledger alone. `digests`: those of the provenance."""

    name: str
    settings: Config | None
    digests: Mapping[str, str]
    recorded: Recorded | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings by dotted key; empty if they are not available."""
        return {} if self.settings is None else by_dotted_key(self.settings)

    @property
    def start(self) -> Start | None:
        """The first line of the ledger."""
        return self.recorded.start if self.recorded is not None else None

    @property
    def identity(self) -> str | None:
        """The digest of all settings that define the run; None if neither settings nor a first line are available."""
        if self.recorded is None:
            return None if self.settings is None else config_digest(self.settings)
        return self.start.identity if self.start is not None else None


def read_side(path: Path) -> Side:
    """The run folder, ledger or configuration at `path`. Raises `InputError` for what is none of them."""
    if path.suffix in (".yaml", ".yml"):
        return Side(str(path), load_config(path), {})
    recorded = open_recorded(path, facts=True)
    folder = recorded.folder
    if folder is None or not folder.config.exists():
        return Side(str(path), None, {}, recorded)
    digests = read_provenance(folder.provenance).digests if folder.provenance.exists() else {}
    return Side(str(path), config_of(folder), digests, recorded)


def compare(one: Side, other: Side) -> Differences:
    """Everything that differs between both, and the first step at which they part."""
    report = Differences()
    # The short digests of a ledger cannot be compared with those of a provenance.
    inputs = [dict(side.start.digests) if side.start is not None else {} for side in (one, other)]
    if one.digests and other.digests:
        inputs = [{**known, **side.digests} for known, side in zip(inputs, (one, other), strict=True)]
    keys = _settings(report, one, other, inputs[0].keys() & inputs[1].keys())
    if keys:
        report.result = Comparison.DIFFERENT
    if one.recorded is None or other.recorded is None:
        if keys is None:
            report.add("result", "not comparable: nothing that both sides have was compared")
            report.result = Comparison.INCOMPARABLE
        else:
            alike = "the same settings; only the names of data and model were compared, not what they stand for"
            report.add("result", f"different: {', '.join(keys)}" if keys else alike)
        return report
    step, odd = one.recorded.trajectory.first_difference(other.recorded.trajectory)
    if _inputs(report, *inputs):
        report.result = Comparison.DIFFERENT
    if one.start is not None and other.start is not None:
        plans = one.start.plan.to_json(), other.start.plan.to_json()
        for name in sorted(plans[0].keys() | plans[1].keys()):
            if plans[0].get(name) != plans[1].get(name):
                report.add("plan", f"{name}: {plans[0].get(name)} | {plans[1].get(name)}")
    if _steps(report, one.recorded, other.recorded, step, odd):
        report.result = Comparison.DIFFERENT
    first, second = (
        side.fingerprint(step or 0) or side.fingerprint(0) or {} for side in (one.recorded, other.recorded)
    )
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            part = "hardware" if name in _HARDWARE or name.startswith("flag ") else "versions"
            report.add(part, f"{name}: {first.get(name, 'none')} | {second.get(name, 'none')}")
    if first != second and report.result is Comparison.DIFFERENT:
        report.add("result", "not comparable: other versions or hardware, where other bits are no fault")
        report.result = Comparison.INCOMPARABLE
    elif report.result is Comparison.SAME and not one.recorded.trajectory.keys() & other.recorded.trajectory.keys():
        report.add("result", "not comparable: there is no step that both have")
        report.result = Comparison.INCOMPARABLE
    elif report.result is Comparison.SAME:
        report.add("result", "the same")
    return report


def _settings(report: Differences, one: Side, other: Side, digests: Collection[str]) -> tuple[str, ...] | None:
    """The keys in which both define different runs; None if nothing could be compared.

    Keys that only place a run are listed and do not count. A name does not count if both sides have a digest, among
    `digests`, of the thing that it stands for: the digests are compared instead.
    """
    if one.settings is None or other.settings is None:
        if one.identity is None or other.identity is None:
            report.add("config", "not compared: one side has neither settings nor a ledger's first line")
            return None
        if one.identity == other.identity:
            return ()
        report.add("config", f"identity: {one.identity[:16]} | {other.identity[:16]} (the settings are not at hand)")
        return ("settings that are not at hand",)
    first, second = one.config, other.config
    defining = {key: values for key, *values in differences(identity(one.settings), identity(other.settings))}
    runs = one.recorded is not None and other.recorded is not None
    # Runs on other devices are compared by their bits.
    for key in _EMBEDDED | ({"run.device_kind"} if runs else set()):
        defining.pop(key, None)
    found = []
    for key in sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key)):
        digested = key in NAMING and ("base" if key.startswith("model.") else "data") in digests
        note = " (a name: what it stands for is compared by its digest)" if digested else ""
        if key in defining or (key in NAMING and not digested):
            found.append(key)
        elif not digested:
            note = " (does not affect the result)"
        report.add("config", f"{key}: {first.get(key)!r} | {second.get(key)!r}{note}")
    for key in sorted(defining.keys() - first.keys()):
        found.append(key)
        report.add("config", f"{key}: {defining[key][0]!r} | {defining[key][1]!r}")
    return tuple(found)


def _inputs(report: Differences, one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Compare the digests that both have. That of data is two in a row if there is a file to evaluate on."""
    odd = [name for name in sorted(one.keys() & other.keys()) if one[name] != other[name]]
    for name in odd:
        of_training = one[name][:_DIGITS] != other[name][:_DIGITS]
        at = 0 if of_training else _DIGITS
        first, second = (each[name][at : at + 16] or "none" for each in (one, other))
        report.add("data", f"{name}{'' if of_training else ' (evaluation)'}: {first} | {second}")
    return bool(odd)


def _steps(report: Differences, one: Recorded, other: Recorded, step: int | None, odd: tuple[Difference, ...]) -> bool:
    """Report the steps; whether they differ, or one side goes on for longer."""
    steps = one.trajectory, other.trajectory
    common = steps[0].keys() & steps[1].keys()
    placed = [each.ran_on or "unknown" for each in steps]
    if placed[0] != placed[1]:
        report.add("place", f"{placed[0]} | {placed[1]}")
    # A watch records only the fields that it was told.
    pairs = {(steps[0].lacking(number), steps[1].lacking(number)) for number in common}
    for at, name in enumerate(REPEATED):
        lacking = {(first >> at & 1, second >> at & 1) for first, second in pairs}
        for alone, called in (((0, 1), "first"), ((1, 0), "second")):
            if alone in lacking:
                report.add("not told", f"{name}: only in the {called}, so not compared")
    counts, longest = [len(each) for each in steps], [max(each, default=0) for each in steps]
    if not common:
        report.add("steps", f"none that both have; {counts[0]} | {counts[1]} in all")
    elif step is None and longest[0] == longest[1]:
        report.add("steps", f"all {len(common)} are the same to the bit")
    elif step is None:
        in_all = f"{longest[0]} | {longest[1]} in all"
        report.add("steps", f"the {len(common)} that both have are the same to the bit; {in_all}")
    if step is None:
        return bool(common) and longest[0] != longest[1]
    more = f"; {counts[0]} | {counts[1]} steps in all" if counts[0] != counts[1] else ""
    earlier = [number for number in steps[0] if number < step]
    before = f"; steps {earlier[0]} to {earlier[-1]} are the same to the bit" if earlier else ""
    report.add("steps", f"differ from step {step} on{before}{more}")
    records, names = [each[step] for each in steps], [each.name for each in odd]
    alike = [name for name in REPEATED if name not in names and not any(lacks(each, name) for each in records)]
    report.add("step", f"{step}: {names[0]} differs first, {', '.join(alike) or 'nothing'} agree")
    for each in odd:
        report.add("step", f"{step}: {each.name}: {shown(each.then, _SHOWN)} | {shown(each.now, _SHOWN)}")
    report.lines.extend(_tensors(one, other, step))
    return True


def _tensors(one: Recorded, other: Recorded, step: int) -> Iterator[str]:
    """The first tensor and element that differ, in the first checkpoint from `step` on that both runs still have."""
    if one.folder is None or other.folder is None:
        return
    names = [{path.name for path in side.glob("step-*")} for side in (one.folder.checkpoints, other.folder.checkpoints)]
    shared = sorted(name for name in names[0] & names[1] if name[5:].isdigit() and int(name[5:]) >= step)
    if not shared:
        yield f"{'tensor':<9} not known: both runs have no checkpoint of one step from {step} on"
        return
    from andon.inspection.tensors import tensors_apart

    for line in tensors_apart(one.folder.checkpoints / shared[0], other.folder.checkpoints / shared[0]):
        yield f"{'tensor':<9} {line}"
