"""Compares two run folders, ledgers or configurations: which settings and inputs differ, and the first step that does.

Runs on different machines or versions cannot be compared by bits: a difference is reported, but not as an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from andon.config.load import NAMING, by_dotted_key, config_digest, differences, identity, load_config
from andon.config.schema import Config
from andon.console.messages import InputError
from andon.inspection.recorded import Recorded, open_recorded
from andon.run.ledger import REPEATED, Difference, lacks, shown
from andon.run.summary import read_provenance
from andon.training.existing import config_of
from andon_contracts.record import Start

_HARDWARE = ("machine", "cpu", "instructions", "threads", "devices")
_DIGITS = 64  # of a SHA-256
_SHOWN = 160
_EMBEDDED = frozenset({"data.embedded", "model.embedded"})  # they follow from data.train and model.base
OTHER_MACHINE = "not comparable: versions or hardware differ, so the bits may differ too"


class Comparison(Enum):
    """The outcome of a comparison; the value is the exit code."""

    SAME = 0
    DIFFERENT = 1
    INCOMPARABLE = 2


@dataclass
class Differences:
    """Lines of the report, and the result."""

    lines: list[str] = field(default_factory=list)
    result: Comparison = Comparison.SAME

    def add(self, part: str, what: str) -> None:
        self.lines.append(f"{part:<9} {what}")


@dataclass(frozen=True)
class Side:
    """A run or a configuration. `settings`: None for a ledger alone. `digests`: those of the provenance, by name."""

    name: str
    settings: Config | None
    digests: Mapping[str, str]
    recorded: Recorded | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings by dotted key."""
        return {} if self.settings is None else by_dotted_key(self.settings)

    @property
    def start(self) -> Start | None:
        return self.recorded.start if self.recorded is not None else None

    @property
    def identity(self) -> str | None:
        """Digest of the settings that define the run; None without settings, and for a ledger without a start."""
        if self.recorded is None:
            return None if self.settings is None else config_digest(self.settings)
        return self.start.identity if self.start is not None else None


def read_side(path: Path) -> Side:
    """Load the run folder, ledger or configuration (.yaml) at `path`. Raises `InputError` for anything else."""
    if path.suffix in (".yaml", ".yml"):
        return Side(str(path), load_config(path), {})
    recorded = open_recorded(path, facts=True)
    folder = recorded.folder
    if folder is None or not folder.config.exists():
        return Side(str(path), None, {}, recorded)
    digests = read_provenance(folder.provenance).digests if folder.provenance.exists() else {}
    return Side(str(path), config_of(folder), digests, recorded)


def compare(one: Side, other: Side) -> Differences:
    """Compare settings, inputs, plan, steps and machine, and find the first step that differs."""
    report = Differences()
    # A ledger's short digests are not comparable with a provenance's full ones.
    inputs = [dict(side.start.digests) if side.start is not None else {} for side in (one, other)]
    if one.digests and other.digests:
        inputs = [{**known, **side.digests} for known, side in zip(inputs, (one, other), strict=True)]
    keys = _settings(report, one, other, inputs[0].keys() & inputs[1].keys())
    if keys:
        report.result = Comparison.DIFFERENT
    if one.recorded is None or other.recorded is None:
        if keys is None:
            report.add("result", "not comparable: the two have no settings in common")
            report.result = Comparison.INCOMPARABLE
        else:
            same = "the same settings; data and model were compared by name, not by content"
            report.add("result", f"different: {', '.join(keys)}" if keys else same)
        return report
    step, fields = one.recorded.trajectory.first_difference(other.recorded.trajectory)
    for name in sorted(inputs[0].keys() & inputs[1].keys()):
        first, second = inputs[0][name], inputs[1][name]
        if first != second:
            report.result = Comparison.DIFFERENT
            # With an evaluation file, the data digest is two digests in a row.
            of_training = first[:_DIGITS] != second[:_DIGITS]
            at = 0 if of_training else _DIGITS
            shown_digests = " | ".join(each[at : at + 16] or "none" for each in (first, second))
            report.add("data", f"{name}{'' if of_training else ' (evaluation)'}: {shown_digests}")
    if one.start is not None and other.start is not None:
        plans = one.start.plan.to_json(), other.start.plan.to_json()
        for name in sorted(plans[0].keys() | plans[1].keys()):
            if plans[0].get(name) != plans[1].get(name):
                report.add("plan", f"{name}: {plans[0].get(name)} | {plans[1].get(name)}")
    if _steps(report, one.recorded, other.recorded, step, fields):
        report.result = Comparison.DIFFERENT
    on = [side.fingerprint(step or 0) or side.fingerprint(0) or {} for side in (one.recorded, other.recorded)]
    for name in sorted(on[0].keys() | on[1].keys()):
        if on[0].get(name) != on[1].get(name):
            part = "hardware" if name in _HARDWARE or name.startswith("flag ") else "versions"
            report.add(part, f"{name}: {on[0].get(name, 'none')} | {on[1].get(name, 'none')}")
    incomparable = ""
    if report.result is Comparison.DIFFERENT:
        incomparable = OTHER_MACHINE if on[0] != on[1] else ""
    elif not one.recorded.trajectory.keys() & other.recorded.trajectory.keys():
        incomparable = "not comparable: the runs have no step in common"
    else:
        report.add("result", "the same")
    if incomparable:
        report.add("result", incomparable)
        report.result = Comparison.INCOMPARABLE
    return report


def _settings(report: Differences, one: Side, other: Side, digests: Collection[str]) -> tuple[str, ...] | None:
    """Report the settings that differ. Returns the keys that define different runs; None if no settings were compared.
    Keys that place a run, and names of data or a base whose `digests` are compared instead, are only reported."""
    if one.settings is None or other.settings is None:
        if one.identity is None or other.identity is None:
            report.add("config", "not compared: one side has no config.yaml, and its ledger has no start line")
            return None
        if one.identity == other.identity:
            return ()
        report.add("config", f"identity: {one.identity[:16]} | {other.identity[:16]} (a digest; no config.yaml)")
        return ("the digest of the settings",)
    first, second = one.config, other.config
    defining = {key: values for key, *values in differences(identity(one.settings), identity(other.settings))}
    runs = one.recorded is not None and other.recorded is not None
    # Two runs on different devices are compared by their bits.
    for key in _EMBEDDED | ({"run.device_kind"} if runs else set()):
        defining.pop(key, None)
    keys = []
    for key in sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key)):
        digested = key in NAMING and ("base" if key.startswith("model.") else "data") in digests
        note = " (only a name: the content is compared by its digest)" if digested else ""
        if key in defining or (key in NAMING and not digested):
            keys.append(key)
        elif not digested:
            note = " (does not affect the result)"
        report.add("config", f"{key}: {first.get(key)!r} | {second.get(key)!r}{note}")
    for key in sorted(defining.keys() - first.keys()):
        keys.append(key)
        report.add("config", f"{key}: {defining[key][0]!r} | {defining[key][1]!r}")
    return tuple(keys)


def _steps(report: Differences, one: Recorded, other: Recorded, step: int | None, diff: tuple[Difference, ...]) -> bool:
    steps = one.trajectory, other.trajectory
    common = steps[0].keys() & steps[1].keys()
    placed = [each.ran_on or "unknown" for each in steps]
    if placed[0] != placed[1]:
        report.add("place", f"{placed[0]} | {placed[1]}")
    # A watch records only the fields that its loop passes to it.
    pairs = {(steps[0].lacking(number), steps[1].lacking(number)) for number in common}
    for at, name in enumerate(REPEATED):
        lacking = {(first >> at & 1, second >> at & 1) for first, second in pairs}
        for alone, called in (((0, 1), "first"), ((1, 0), "second")):
            if alone in lacking:
                report.add("skipped", f"{name}: only the {called} run recorded it")
    if step is None:
        which = f"all {len(common)}" if steps[0].keys() == steps[1].keys() else f"the {len(common)} in common"
        report.add("steps", f"{which} are the same to the bit" if common else "none in common")
    else:
        earlier = sorted(number for number in common if number < step)
        before = f"; steps {earlier[0]} to {earlier[-1]} are the same to the bit" if earlier else ""
        report.add("steps", f"differ from step {step} on{before}")
    unshared = [sorted(each.keys() - common) for each in steps]
    for only, called in zip(unshared, ("first", "second"), strict=True):
        if only:
            report.add("steps", f"{only[0]} to {only[-1]} ({len(only)}) are only in the {called} run")
    if step is None:  # a resume may begin a new ledger, but must reach the same end without a gap
        return any(only and common and only[-1] > min(common) for only in unshared)
    records, names = [each[step] for each in steps], [each.name for each in diff]
    equal = [name for name in REPEATED if name not in names and not any(lacks(each, name) for each in records)]
    report.add("step", f"{step}: {names[0]} differs first; equal: {', '.join(equal) or 'nothing'}")
    for each in diff:
        report.add("step", f"{step}: {each.name}: {shown(each.then, _SHOWN)} | {shown(each.now, _SHOWN)}")
    report.lines.extend(_tensors(one, other, step))
    return True


def _tensors(one: Recorded, other: Recorded, step: int) -> Iterator[str]:
    if one.folder is None or other.folder is None:
        return
    names = [{path.name for path in side.glob("step-*")} for side in (one.folder.checkpoints, other.folder.checkpoints)]
    shared = sorted(name for name in names[0] & names[1] if name[5:].isdigit() and int(name[5:]) >= step)
    if not shared:
        yield f"{'tensor':<9} cannot be named: the runs share no checkpoint of step {step} or later"
        return
    for line in tensors_apart(one.folder.checkpoints / shared[0], other.folder.checkpoints / shared[0]):
        yield f"{'tensor':<9} {line}"


def tensors_apart(one: Path, other: Path) -> Iterator[str]:
    """Lines on the tensors that differ between two checkpoints. Raises `InputError` if one of them is damaged."""
    import torch

    from andon.run.checkpoint import CheckpointError, load_checkpoint

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))

    try:
        first, second = load_checkpoint(one).tensors, load_checkpoint(other).tensors
    except CheckpointError as error:
        raise InputError.at("", str(error)) from error
    shared = sorted(first.keys() & second.keys())
    changed = [name for name in shared if not same(first[name], second[name])]
    extra = [len(each) - len(shared) for each in (first, second)]
    if any(extra):
        both = f"{len(shared)} in both ({len(changed)} differ)" if changed else f"{len(shared)} in both (equal)"
        yield f"{one.name}: {extra[0]} only in the first run, {extra[1]} only in the second, {both}"
    if not changed:
        if not any(extra):
            yield f"all {len(shared)} of {one.name} are the same"
        return
    # Weights first, then optimizer moments; by name.
    name = min(changed, key=lambda name: (not name.startswith("weights/"), name))
    pair = first[name], second[name]
    place = " | ".join(f"{each.dtype} {list(each.shape)}" for each in pair)
    if pair[0].dtype == pair[1].dtype and pair[0].shape == pair[1].shape:
        unequal = (bits(pair[0]) != bits(pair[1])).view(-1, pair[0].element_size()).any(dim=1)
        at = int(unequal.nonzero()[0])
        index = [int(each) for each in torch.unravel_index(torch.tensor(at), pair[0].shape)]
        values = [each.contiguous().view(-1)[at].item() for each in pair]
        texts = " | ".join(value.hex() if isinstance(value, float) else str(value) for value in values)
        place = f"at {index}: {texts} ({int(unequal.sum())} of {pair[0].numel()} elements)"
    yield f"{name} differs first ({len(changed)} of {len(shared)} tensors of {one.name} do), {place}"
