"""How a named predicate becomes a contract: enforced under `-O`, counted, with one switch.

A predicate is a plain typed function over plain values. Marked with `clause` it tests a promise of the registry, and
breaking it is a `Violation`; marked with `argument` it tests what a caller passed, and breaking it is a `ValueError`.
`require` and `ensure` are icontract's decorators for such predicates.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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

        counted.__andon_test__ = (predicate, registered.name)  # type: ignore[attr-defined]
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
    """A precondition that stays on under `python -O`. The predicate must be marked by `clause` or `argument`."""
    return icontract.require(predicate, error=_error_of(predicate), enabled=True)


def ensure(predicate: Predicate) -> Callable[[F], F]:
    """A postcondition that stays on under `python -O`. The predicate must be marked by `clause` or `argument`."""
    decorate = icontract.ensure(predicate, error=_error_of(predicate), enabled=True)

    def ensured(function: F) -> F:
        decorated = decorate(function)
        decorated.__andon_ensures__ = (*getattr(function, "__andon_ensures__", ()), predicate)  # type: ignore[attr-defined]
        return decorated

    return ensured


def ensure_all(functions: Sequence[Callable[..., Any]]) -> Callable[[F], F]:
    """All clauses that `ensure` gave to `functions`, in their order, as one postcondition: for the price of one call.

    Each is evaluated and counted until one is false, which is then the error. What is decorated must have the
    parameters that they ask for.
    """
    predicates: list[Predicate] = [
        predicate for function in functions for predicate in getattr(function, "__andon_ensures__", ())
    ]
    names = dict.fromkeys(["result", *(name for predicate in predicates for name in _parameters(predicate))])
    signature = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])
    ways = list(dict.fromkeys(map(_parameters, predicates)))
    asked = [(each, *_test_of(each), ways.index(_parameters(each))) for each in predicates]

    def broken(given: Mapping[str, Any]) -> Predicate | None:
        if not _enforced:
            return None
        arguments = [[given[name] for name in way] for way in ways]
        for predicate, test, name, way in asked:
            _evaluations[name] += 1
            if not test(*arguments[way]):
                return predicate
        return None

    def all_hold(**given: Any) -> bool:
        return broken(given) is None

    def error(**given: Any) -> Exception:
        found = broken(given)
        assert found is not None
        return _error_of(found)(**{name: given[name] for name in _parameters(found)})

    all_hold.__signature__ = error.__signature__ = signature  # type: ignore[attr-defined]
    return icontract.ensure(all_hold, error=error, enabled=True)


def _test_of(predicate: Predicate) -> tuple[Predicate, str]:
    """What `clause` marked, without its counting, and the clause's name. Raises `TypeError` for any other function."""
    found: tuple[Predicate, str] | None = getattr(predicate, "__andon_test__", None)
    if found is None:
        msg = f"{predicate.__name__} is not marked by @clause"
        raise TypeError(msg)
    return found


def _parameters(predicate: Predicate) -> tuple[str, ...]:
    return tuple(inspect.signature(predicate).parameters)


def _error_of(predicate: Predicate) -> Callable[..., Exception]:
    error: Callable[..., Exception] | None = getattr(predicate, "__andon_error__", None)
    if error is None:
        msg = f"{predicate.__name__} is not marked by @clause or @argument"
        raise TypeError(msg)
    return error
