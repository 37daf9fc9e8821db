"""How a named predicate becomes a contract: enforced under `-O`, counted, with one switch.

A predicate marked with `clause` tests a promise of the registry, and raises `Violation`. A predicate marked with
`argument` tests what a caller passed, and raises `ValueError`. `require` and `ensure` are icontract's decorators for
both. The observations of all ranks at a point of a step are judged by a table of `laws` instead.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import icontract

from andon_contracts.clauses import CLAUSES
from andon_contracts.violation import Finding, Violation

Predicate = Callable[..., bool]
F = TypeVar("F", bound=Callable[..., Any])

_evaluations: Counter[str] = Counter()
_enforced = True


def evaluations() -> Mapping[str, int]:
    """How often each clause was evaluated in this process since `reset_evaluations`.

    A contract that never ran proves nothing, so runs print these numbers.
    """
    return dict(_evaluations)


def reset_evaluations() -> None:
    _evaluations.clear()


def enforced() -> bool:
    """False while contracts are `suspended` in this process."""
    return _enforced


def count(name: str) -> None:
    _evaluations[name] += 1


@contextmanager
def suspended() -> Iterator[None]:
    """Evaluate no clause inside: to measure what the contracts cost, and to plant the fault `guard off`."""
    global _enforced
    before, _enforced = _enforced, False
    try:
        yield
    finally:
        _enforced = before


def clause(name: str, explain: Callable[..., Finding]) -> Callable[[Predicate], Predicate]:
    """Mark a predicate as a test of the registered clause `name`.

    explain: takes the predicate's own parameters and returns the finding; it runs only after the predicate was false.
    Raises `KeyError` at import for a name that is not registered.
    """
    name = CLAUSES[name].name

    def mark(predicate: Predicate) -> Predicate:
        @functools.wraps(predicate)
        def counted(*args: Any, **kwargs: Any) -> bool:
            if not _enforced:
                return True
            count(name)
            return predicate(*args, **kwargs)

        return _marked(counted, predicate, lambda *args, **kwargs: Violation.of(name, explain(*args, **kwargs)))

    return mark


def argument(explain: Callable[..., str]) -> Callable[[Predicate], Predicate]:
    """Mark a predicate as a test of what a caller passed. explain: the message, from the predicate's parameters."""
    return lambda predicate: _marked(predicate, predicate, lambda *args, **kwargs: ValueError(explain(*args, **kwargs)))


def _marked(tested: Predicate, predicate: Predicate, error: Callable[..., Exception]) -> Predicate:
    # icontract passes arguments by parameter name, so the error factory must have the predicate's signature.
    error.__signature__ = inspect.signature(predicate)  # type: ignore[attr-defined]
    tested.__andon_error__ = error  # type: ignore[attr-defined]
    return tested


def require(predicate: Predicate) -> Callable[[F], F]:
    """A precondition that stays on under `python -O`, of a predicate marked by `clause` or `argument`."""
    return icontract.require(predicate, error=_error_of(predicate), enabled=True)


def ensure(predicate: Predicate) -> Callable[[F], F]:
    """A postcondition that stays on under `python -O`, of a predicate marked by `clause` or `argument`."""
    return icontract.ensure(predicate, error=_error_of(predicate), enabled=True)


def _error_of(predicate: Predicate) -> Callable[..., Exception]:
    error: Callable[..., Exception] | None = getattr(predicate, "__andon_error__", None)
    if error is None:
        raise TypeError(f"{predicate.__name__} is not marked by @clause or @argument")
    return error
