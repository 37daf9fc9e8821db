"""Where two runs part, and what else differs between them (issue 3 item 8).

Works on any two of: run folder, ledger, configuration. Bits of different machines or versions are not comparable: a
difference there is said, and is never called wrong.
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
from andon.run.repeats import REPEATED, lacks, shown
from andon.training.existing import config_of

_HARDWARE = ("machine", "cpu", "instructions", "threads", "devices")
_DIGITS = 64
"""Of a SHA-256."""
_SHOWN = 160
_UNKNOWN = "unknown"
_DEVICE_KIND = "run.device_kind"
_EMBEDDED = frozenset({"data.embedded", "model.embedded"})
"""Facts that the names say already."""


class Comparison(Enum):
    """The outcome of a comparison; the value is the exit code."""

    SAME = 0
    DIFFERENT = 1
    INCOMPARABLE = 2


@dataclass
class Differences:
    """Lines for a reader, and what they come to."""

    lines: list[str] = field(default_factory=list)
    result: Comparison = Comparison.SAME

    def add(self, part: str, what: str) -> None:
        """One line under the heading `part`."""
        self.lines.append(f"{part:<9} {what}")


@dataclass(frozen=True)
class Side:
    """One of the two: a run, or only what a run is to be.

    `settings`: None for a ledger alone. `digests` of what goes in by name, as the run's provenance has them; empty
    where there is none.
    """

    name: str
    settings: Config | None
    digests: Mapping[str, str]
    recorded: Recorded | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings by dotted key; empty if they are not available."""
        return {} if self.settings is None else by_dotted_key(self.settings)

    @property
    def told(self) -> Mapping[str, str]:
        """The digests of what goes in, as the ledger has them, in short."""
        start = self.recorded.start if self.recorded is not None else None
        return start.digests if start is not None else {}

    @property
    def identity(self) -> str | None:
        """The digest of all settings that define the run; None where neither settings nor a first line are there."""
        if self.recorded is None:
            return None if self.settings is None else config_digest(self.settings)
        return self.recorded.start.identity if self.recorded.start is not None else None


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
    inputs = _inputs(one, other)
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
    apart = _pairs(report, "data", *inputs)
    _plans(report, one.recorded, other.recorded)
    if _steps(report, one.recorded, other.recorded) or apart:
        report.result = Comparison.DIFFERENT
    machines = _machines(report, one.recorded, other.recorded)
    if machines and report.result is Comparison.DIFFERENT:
        report.add("result", "not comparable: other versions or hardware, where other bits are no fault")
        report.result = Comparison.INCOMPARABLE
    elif report.result is Comparison.SAME and not one.recorded.trajectory.keys() & other.recorded.trajectory.keys():
        report.add("result", "not comparable: there is no step that both have")
        report.result = Comparison.INCOMPARABLE
    elif report.result is Comparison.SAME:
        report.add("result", "the same")
    return report


def _inputs(one: Side, other: Side) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The digests of what went into both, from one source: the short ones of a ledger are not those of a provenance."""
    if one.digests and other.digests:
        return {**one.told, **one.digests}, {**other.told, **other.digests}
    return one.told, other.told


def _settings(report: Differences, one: Side, other: Side, digests: Collection[str]) -> tuple[str, ...] | None:
    """The keys in which both define different runs; None where nothing could be compared.

    Keys that only place a run are listed and do not count. A name does not count where what it stands for has a digest
    on both sides, among `digests`: that is compared instead.
    """
    if one.settings is None or other.settings is None:
        return _identities(report, one, other)
    runs = one.recorded is not None and other.recorded is not None
    first, second = one.config, other.config
    defining = {key: values for key, *values in differences(identity(one.settings), identity(other.settings))}
    for key in _EMBEDDED | ({_DEVICE_KIND} if runs else set()):  # runs on other devices are compared by their bits
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


def _identities(report: Differences, one: Side, other: Side) -> tuple[str, ...] | None:
    """The same by the digests of all settings, where those of one side are not at hand."""
    if one.identity is None or other.identity is None:
        report.add("config", "not compared: one side has neither settings nor a ledger's first line")
        return None
    if one.identity == other.identity:
        return ()
    report.add("config", f"identity: {one.identity[:16]} | {other.identity[:16]} (the settings are not at hand)")
    return ("settings that are not at hand",)


def _pairs(report: Differences, part: str, one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """One line for each name that both have with different values; whether there is one."""
    odd = [name for name in sorted(one.keys() & other.keys()) if one[name] != other[name]]
    for name in odd:
        part_of_it, first, second = _unlike(one[name], other[name])
        report.add(part, f"{name}{part_of_it}: {first} | {second}")
    return bool(odd)


def _unlike(one: str, other: str) -> tuple[str, str, str]:
    """The first digest in which two rows of digests differ, in short, and which it is: data has one of what is trained
    on and, where there is such a file, one of what is evaluated on."""
    of_training = one[:_DIGITS] != other[:_DIGITS]
    at = 0 if of_training else _DIGITS
    shown = [each[at : at + 16] or "none" for each in (one, other)]
    return ("" if of_training else " (evaluation)"), shown[0], shown[1]


def _plans(report: Differences, one: Recorded, other: Recorded) -> None:
    if one.start is None or other.start is None:
        return
    first, second = one.start.plan.to_json(), other.start.plan.to_json()
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            report.add("plan", f"{name}: {first.get(name)} | {second.get(name)}")


def _machines(report: Differences, one: Recorded, other: Recorded) -> bool:
    """Whether what both ran on can give other bits: versions, hardware, flags."""
    step = one.trajectory.first_difference(other.trajectory)[0] or 0
    first, second = (side.fingerprint(step) or side.fingerprint(0) or {} for side in (one, other))
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            part = "hardware" if name in _HARDWARE or name.startswith("flag ") else "versions"
            report.add(part, f"{name}: {first.get(name, 'none')} | {second.get(name, 'none')}")
    return first != second


def _steps(report: Differences, one: Recorded, other: Recorded) -> bool:
    step, odd = one.trajectory.first_difference(other.trajectory)
    common = len(one.trajectory.keys() & other.trajectory.keys())
    _places(report, one, other)
    _untold(report, one, other)
    if not common:
        report.add("steps", f"none that both have; {len(one.trajectory)} | {len(other.trajectory)} in all")
        return False
    if step is None:
        longest = [max(side.trajectory, default=0) for side in (one, other)]
        if longest[0] == longest[1]:
            report.add("steps", f"all {common} are the same to the bit")
            return False
        report.add("steps", f"the {common} that both have are the same to the bit; {longest[0]} | {longest[1]} in all")
        return True
    counts = [len(side.trajectory) for side in (one, other)]
    more = f"; {counts[0]} | {counts[1]} steps in all" if counts[0] != counts[1] else ""
    report.add("steps", f"differ from step {step} on{_before(one, step)}{more}")
    records, names = (one.trajectory[step], other.trajectory[step]), [each.name for each in odd]
    alike = [name for name in REPEATED if name not in names and not any(lacks(each, name) for each in records)]
    report.add("step", f"{step}: {names[0]} differs first, {', '.join(alike) or 'nothing'} agree")
    for each in odd:
        report.add("step", f"{step}: {each.name}: {shown(each.then, _SHOWN)} | {shown(each.now, _SHOWN)}")
    report.lines.extend(_tensors(one, other, step))
    return True


def _places(report: Differences, one: Recorded, other: Recorded) -> None:
    placed = [side.trajectory.ran_on for side in (one, other)]
    if placed[0] != placed[1]:
        report.add("place", f"{placed[0] or _UNKNOWN} | {placed[1] or _UNKNOWN}")


def _untold(report: Differences, one: Recorded, other: Recorded) -> None:
    """The fields that steps of one side alone have: they were not told to the other's watch, and are not compared."""
    common = one.trajectory.keys() & other.trajectory.keys()
    pairs = {(one.trajectory.lacking(step), other.trajectory.lacking(step)) for step in common}
    for at, name in enumerate(REPEATED):
        lacking = {(first >> at & 1, second >> at & 1) for first, second in pairs}
        for alone, called in (((0, 1), "first"), ((1, 0), "second")):
            if alone in lacking:
                report.add("not told", f"{name}: only in the {called}, so not compared")


def _before(one: Recorded, step: int) -> str:
    earlier = [number for number in one.trajectory if number < step]
    return f"; steps {earlier[0]} to {earlier[-1]} are the same to the bit" if earlier else ""


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
