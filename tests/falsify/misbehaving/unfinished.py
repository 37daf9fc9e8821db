"""Things that are no loops."""

from __future__ import annotations

from torch import nn

from andon_falsify.subjects.case import Case


class WithoutTrain:
    """Has a model and nothing to do with it."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)


class WithoutModel:
    """Trains nobody knows what."""

    def train(self, told: object) -> None:
        """Do nothing."""


def make_without_train(case: Case) -> WithoutTrain:
    """Lacks `train`."""
    return WithoutTrain()


def make_without_model(case: Case) -> WithoutModel:
    """Lacks `model`."""
    return WithoutModel()


class WithEmptyModel(WithoutModel):
    """Says that what it trains is nothing."""

    model = None


def make_with_empty_model(case: Case) -> WithEmptyModel:
    """Has a `model` that is none."""
    return WithEmptyModel()


def make_nothing(case: Case) -> None:
    """Gives no loop at all."""


not_a_function = 3
