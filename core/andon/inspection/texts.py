"""The rows of a run with their texts, where its data is still at hand and still the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from andon.config.load import load_config
from andon.data.rows import Row
from andon.problems import InputError
from andon.run.folder import RunFolder
from andon.run.provenance import read_provenance
from andon.training.rows import read_rows


@dataclass(frozen=True)
class Texts:
    """Training rows by id and the names of their labels; `missing` says why there are none."""

    rows: Mapping[int, Row] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    missing: str = ""


def texts_of(folder: RunFolder | None) -> Texts:
    """The rows that the run trained on; raises nothing for data that is gone or has changed, but says so."""
    if folder is None or not folder.config.exists():
        return Texts(missing="a ledger alone names rows by id; their texts are not in it")
    try:
        found = read_rows(load_config(folder.config))
        recorded = read_provenance(folder.provenance).digest("data")
    except InputError as error:
        return Texts(missing=f"the texts are not at hand: {error}")
    if recorded != found.digest:
        return Texts(missing="the texts are not shown: the data is no longer that which the run was trained on")
    return Texts({row.id: row for row in found.train.rows}, tuple(found.train.labels))
