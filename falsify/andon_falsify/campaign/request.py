"""Reads the options of `andon falsify`: reports everything that is wrong with them at once, and needs no torch."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from andon.console.messages import InputError, Problem, install_hint
from andon_falsify.campaign.trial import BUDGETS, Budget
from andon_falsify.claims import CHECKS
from andon_falsify.claims.clauses import ALIASES
from andon_falsify.peers.registry import PEERS, installed

OURS = "andon"
_MOST_RANKS, _MOST_SEEDS, _MOST_DIGITS = 64, 10_000, 18
_NAMED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@dataclass(frozen=True)
class Request:
    """A campaign to run. Empty worlds, accumulations or backends: those of the budget, and of the machine.

    subject: a bundled name, `module:make`, or our own trainer. case: a trial as JSON, to be run exactly as it is. name:
    the subject's name in reports, "" for its own. expected_failed: the claims that may fall, each with the reason.
    """

    subject: str
    script: str | None
    backends: tuple[str, ...]
    worlds: tuple[int, ...]
    accumulations: tuple[int, ...]
    seeds: tuple[int, ...]
    budget: Budget
    claims: tuple[str, ...]
    case: str | None
    name: str
    expected_failed: Mapping[str, str]


def read_request(
    *,
    subject: str | None = None,
    script: str | None = None,
    backend: str | None = None,
    world: str | None = None,
    accumulation: str | None = None,
    seed: str = "0",
    budget: str = "quick",
    claims: Sequence[str] = (),
    case: str | None = None,
    name: str | None = None,
    expected_failed: Sequence[str] = (),
) -> Request:
    """The request for options as they were typed. Raises `InputError` with everything that is wrong."""
    wrong: list[Problem] = []
    worlds = _numbers("--world", world, wrong)
    accumulations = _numbers("--accumulation", accumulation, wrong)
    backends = _words(backend)
    seeds = read_seeds("--seed", seed, wrong)
    if budget not in BUDGETS:
        wrong.append(Problem("--budget", f"must be one of {', '.join(BUDGETS)}, not {budget!r}"))
    wrong += _subject_problems(subject, script)
    if name is not None and not name.strip():
        wrong.append(Problem("--name", "is empty"))
    reasons = {}
    for text in expected_failed:
        claim, _, reason = (part.strip() for part in text.partition(":"))
        if not claim or not reason:
            wrong.append(Problem("--expected-failed", f"must be CLAIM: REASON, not {reprlib.repr(text)}"))
        reasons[ALIASES.get(claim, claim)] = reason
    if case is not None and not all(len(given) == 1 for given in (backends, worlds, accumulations, seeds)):
        need = "--backend, --world, --accumulation and --seed"
        wrong.append(Problem("--case", f"needs exactly one value for each of {need}"))
    if wrong:
        raise InputError(wrong)
    names = tuple(ALIASES.get(claim, claim) for given in claims for claim in _words(given))
    size, title = BUDGETS[budget], (name or "").strip()
    where = (backends, worlds, accumulations, seeds)
    return Request(subject or OURS, script, *where, size, names, case, title, reasons)


def check_names(option: str, given: Sequence[str], known: Collection[str], what: str) -> list[Problem]:
    """A problem for each unknown name of `given`, with the most similar known one."""
    wrong = []
    for name in given:
        if name not in known:
            other = " about this kind of subject" if name in CHECKS else ""
            wrong.append(Problem(option, f"there is no {what} {name!r}{other}; {_meant(name, known, 'there')}"))
    return wrong


def _subject_problems(subject: str | None, script: str | None) -> list[Problem]:
    if script is not None:
        both = [Problem("--script", "and --subject exclude each other: give one")] if subject else []
        return both + ([] if script.strip() else [Problem("--script", "is empty; give the command that trains")])
    absent = [name for name in ("transformers", "peft") if not installed(name)]
    if subject in (None, OURS) and absent:
        remedy = f"{install_hint('falsify')}; or name another trainer by --script or --subject"
        return [Problem("--subject", f"Andon's trainer needs {' and '.join(absent)}; {remedy}")]
    if subject is None or subject == OURS or _NAMED.fullmatch(subject):
        return []
    if subject in PEERS:
        return [Problem("--subject", PEERS[subject].missing)] if PEERS[subject].missing else []
    meant = _meant(subject, [OURS, *PEERS], "bundled")
    return [Problem("--subject", f"{subject!r} is neither bundled nor package.module:make; {meant}")]


def _meant(name: str, known: Collection[str], which: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"{which} are {', '.join(known)}"


def _words(given: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in (given or "").split(",") if word.strip()))


def _numbers(option: str, given: str | None, wrong: list[Problem]) -> tuple[int, ...]:
    words = _words(given)
    if given is not None and not (words and all(_is_number(each) and 1 <= int(each) <= _MOST_RANKS for each in words)):
        wrong.append(Problem(option, f"must be numbers from 1 to {_MOST_RANKS}, as in 2,3; not {reprlib.repr(given)}"))
        return ()
    return tuple(dict.fromkeys(map(int, words)))


def _is_number(word: str) -> bool:
    """Python refuses to read numbers of thousands of digits."""
    return word.isdecimal() and len(word) <= _MOST_DIGITS


def read_seeds(option: str, given: str, wrong: list[Problem]) -> tuple[int, ...]:
    first, dash, last = given.strip().partition("-")
    if _is_number(first) and _is_number(last if dash else first):
        seeds = range(int(first), int(last if dash else first) + 1)
        if 0 < len(seeds) <= _MOST_SEEDS:
            return tuple(seeds)
    need = f"a number, or two as in 0-199, of at most {_MOST_SEEDS} seeds"
    wrong.append(Problem(option, f"must be {need}, not {reprlib.repr(given)}"))
    return ()
