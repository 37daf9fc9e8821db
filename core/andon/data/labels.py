"""Parsing and validation of labels, and class weights."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Literal

from andon.console.problems import InputError, Problem, shown

ClassWeights = Literal["uniform", "inverse", "sqrt_inverse"]

_FRACTION = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?")
_NUMBER = re.compile(r"[-+]?((\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|inf|infinity|nan)", re.IGNORECASE | re.ASCII)
_AS_SETS = "; to learn several labels a row: --task multi-label"
_AS_NUMBERS = "; to learn the numbers themselves: --task regression"
LARGEST_TARGET = 3e38
"""The largest absolute target; the fp32 maximum is 3.4e38."""


def text_fault(text: str) -> str | None:
    """The reason `text` is unusable as a text or class name, or None."""
    if not text.strip():
        return "is empty" if not text else f"is only white space ({shown(text)})"
    if "\0" in text:
        return f"holds a NUL character ({shown(text)})"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"holds a lone surrogate at character {error.start} ({shown(text[max(0, error.start - 10) :])})"
    return None


def column_fault(name: str, value: object) -> str | None:
    """The reason `value` in column `name` is unusable as a text, or None."""
    fault = text_fault(value) if isinstance(value, str) else must_be("a string", value)
    return f"{name} {fault}" if fault else None


def must_be(wanted: str, value: object) -> str:
    return f"must be {wanted}, is {'null' if value is None else shown(value)}"


def class_of(label: object, typed: bool) -> tuple[object, str | None]:
    """(label, its fault or None) for classification. typed: as in `Table`; untyped labels are strings."""
    fault = None
    negative = f"label {label} is negative; labels are integers from 0, or strings"
    if label is None:
        fault = "label is null"
    elif isinstance(label, str):
        fault = text_fault(label)
        if fault is not None:
            fault = f"label {fault}"
        elif not typed and _FRACTION.fullmatch(label):
            fault = f"label {label} is a number with a fraction; labels are integers from 0, or strings{_AS_NUMBERS}"
        elif not typed and re.fullmatch(r"-\d+", label):
            fault = negative
    elif isinstance(label, int) and not isinstance(label, bool):
        fault = None if label >= 0 else negative
    else:
        hint = _AS_NUMBERS if isinstance(label, float) else _AS_SETS if isinstance(label, list) else ""
        fault = f"label {shown(label)} is a {type(label).__name__}; labels are integers from 0, or strings{hint}"
    return label, fault


def target_of(label: object, typed: bool) -> tuple[float, str | None]:
    """(number, its fault or None) for regression. typed: as in `Table`; untyped labels are strings."""
    if label is None:
        return 0.0, "label is null"
    if isinstance(label, bool) or not isinstance(label, int | float if typed else str):
        return 0.0, f"label {shown(label)} is a {type(label).__name__}, and a number is learned"
    if isinstance(label, str) and not _NUMBER.fullmatch(label.strip()):
        return 0.0, f"label {shown(label)} is not a number"
    try:
        number = float(label)
    except OverflowError:  # JSON integers are unbounded
        number = math.inf
    if math.isnan(number):
        return 0.0, f"label {shown(label)} is not finite"
    if abs(number) > LARGEST_TARGET:
        return 0.0, f"label {shown(label)} is beyond {LARGEST_TARGET:g}, and a model gives numbers of fp32"
    return number, None


def label_set_of(separator: str | None, label: object, typed: bool) -> tuple[tuple[str, ...], str | None]:
    """(labels of a row, their fault or None) for multi-label classification.

    label: a list of strings, or a string of labels joined by `separator`; an empty string means no labels.
    """
    if isinstance(label, str) and separator is not None:
        label = [part.strip() for part in label.split(separator)] if label.strip() else []
    if isinstance(label, str):
        remedy = "--set data.label_separator=';'"
        return (), f"label {shown(label)} is one string; write a list, or say what is between labels: {remedy}"
    if not isinstance(label, list):
        return (), f"label {shown(label)} is a {type(label).__name__}, and a list of labels is learned"
    for name in label:
        fault = text_fault(name) if isinstance(name, str) else f"is a {type(name).__name__}, and labels are strings"
        if fault is not None:
            return (), f"label {shown(name)} {fault}"
    repeated = next((name for name in label if label.count(name) > 1), None)
    return tuple(label), None if repeated is None else f"label {shown(repeated)} is there twice"


def likely_separator(labels: Sequence[str]) -> str:
    """The separator that splits more than half of the labels into several parts, or an empty string."""
    for separator in (";", "|", ","):
        joined = sum(len([part for part in label.split(separator) if part.strip()]) > 1 for label in labels)
        if 2 * joined > len(labels):
            return separator
    return ""


def same_kind(labels: Sequence[int | str], typed: bool) -> tuple[Sequence[int | str], list[tuple[int, str]]]:
    """(labels as integers or strings, (position, fault) of each label whose type is not the majority's).

    Untyped labels become integers if all are integers without leading zeros.
    """
    # An untyped label of more than 18 digits is a name.
    number = re.compile(r"[0-9]{1,18}")
    integer = [isinstance(label, int) if typed else number.fullmatch(str(label)) is not None for label in labels]
    integers = sum(integer)
    if integers == len(labels) and not typed:
        plain = all(str(int(label)) == label for label in labels)
        return ([int(label) for label in labels] if plain else labels), []
    if integers in (0, len(labels)):
        return labels, []
    usual = 2 * integers >= len(labels)
    strings = len(labels) - integers
    others = f"{integers} others, which are integers" if usual else f"{strings} others, which are strings"
    return labels, [
        (place, f"label {shown(label)} is of another type than {others}")
        for place, (label, is_integer) in enumerate(zip(labels, integer, strict=True))
        if is_integer != usual
    ]


def alike(names: Sequence[str]) -> list[list[str]]:
    """Groups of names that differ only in case, white space or Unicode form, in the order of `names`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(" ".join(unicodedata.normalize("NFKC", name).casefold().split()), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def class_weights(kind: ClassWeights, counts: Sequence[int], names: Sequence[str] = ()) -> tuple[float, ...]:
    """One weight per class, with sum K, from the `counts` of rows in each of K classes (F-TUNE-005 of the seed).

    uniform: all 1; inverse: proportional to n / (K * n_c); sqrt_inverse: to its square root. names: of the classes, for
    messages. Raises `InputError` without classes, and for a class without rows unless `kind` is uniform.
    """
    if not counts:
        raise InputError("class weights need at least one class")
    if kind == "uniform":
        return (1.0,) * len(counts)
    absent = [number for number, count in enumerate(counts) if count <= 0]
    if absent:
        shown_as = [shown(names[number]) if names else str(number) for number in absent]
        what = f"{kind} needs a training row of every class; no row has class"
        raise InputError([Problem("data.class_weights", f"{what} {name}") for name in shown_as])
    total = sum(counts)
    raw = [total / (len(counts) * count) for count in counts]
    if kind == "sqrt_inverse":
        raw = [math.sqrt(weight) for weight in raw]
    scale = len(counts) / math.fsum(raw)
    return tuple(weight * scale for weight in raw)
