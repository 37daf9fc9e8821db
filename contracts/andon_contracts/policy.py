"""How a named predicate becomes a contract: enforced under `-O`, counted, with one switch.

A predicate is a plain typed function over plain values. Marked with `clause` it tests a promise of the registry, and
breaking it is a `Violation`; marked with `argument` it tests what a caller passed, and breaking it is a `ValueError`.
`require` and `ensure` are icontract's decorators for such predicates. What all ranks said at a point of a step is held
to a table of `laws` instead.
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
    """Start counting anew, at the start of a run."""
    _evaluations.clear()


def enforced() -> bool:
    """Whether clauses are evaluated in this process."""
    return _enforced


def count(name: str) -> None:
    """A law of the clause `name` is evaluated. For those who judge without a predicate of this module."""
    _evaluations[name] += 1


@contextmanager
def suspended() -> Iterator[None]:
    """Evaluate no clause inside: for measuring what the contracts cost, and for planting the fault `guard off`."""
    global _enforced
    before, _enforced = _enforced, False
    try:
        yield
    finally:
        _enforced = before


def clause(name: str, explain: Callable[..., Finding]) -> Callable[[Predicate], Predicate]:
    """Mark a predicate as a test of the registered clause `name`.

    `explain` takes the predicate's own parameters and says what was seen; it runs only after the predicate was false.
    Raises `KeyError` at import for a name that is not registered.
    """
    registered = CLAUSES[name]

    def mark(predicate: Predicate) -> Predicate:
        @functools.wraps(predicate)
        def counted(*args: Any, **kwargs: Any) -> bool:
            if not _enforced:
                return True
            _evaluations[registered.name] += 1
            return predicate(*args, **kwargs)

        def error(*args: Any, **kwargs: Any) -> Exception:
            return Violation.of(registered.name, explain(*args, **kwargs))

        return _with_error(counted, error, predicate)

    return mark


def argument(explain: Callable[..., str]) -> Callable[[Predicate], Predicate]:
    """Mark a predicate as a test of what a caller passed; `explain` makes the message, with the value in it."""

    def mark(predicate: Predicate) -> Predicate:
        @functools.wraps(predicate)
        def tested(*args: Any, **kwargs: Any) -> bool:
            return predicate(*args, **kwargs)

        def error(*args: Any, **kwargs: Any) -> Exception:
            return ValueError(explain(*args, **kwargs))

        return _with_error(tested, error, predicate)

    return mark


def _with_error(marked: Predicate, error: Callable[..., Exception], predicate: Predicate) -> Predicate:
    # icontract passes arguments by parameter name, so the error factory must show the predicate's signature.
    error.__signature__ = inspect.signature(predicate)  # type: ignore[attr-defined]
    marked.__andon_error__ = error  # type: ignore[attr-defined]
    return marked


def require(predicate: Predicate) -> Callable[[F], F]:
    """A precondition that stays on under `python -O`, of a predicate marked by `clause` or `argument`."""
    return icontract.require(predicate, error=_error_of(predicate), enabled=True)


def ensure(predicate: Predicate) -> Callable[[F], F]:
    """A postcondition that stays on under `python -O`, of a predicate marked by `clause` or `argument`."""
    return icontract.ensure(predicate, error=_error_of(predicate), enabled=True)


def _error_of(predicate: Predicate) -> Callable[..., Exception]:
    error: Callable[..., Exception] | None = getattr(predicate, "__andon_error__", None)
    if error is None:
        msg = f"{predicate.__name__} is not marked by @clause or @argument"
        raise TypeError(msg)
    return error
