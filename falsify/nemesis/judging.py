"""What was promised against what was seen: each difference in words. Knows nothing of the trainer."""

from __future__ import annotations

from .language import Phase, Promise
from .run import Ending

_TRACEBACK = "Traceback (most recent call last)"


def wrong(promise: Promise, phase: Phase) -> tuple[str, ...]:
    """Every part of a promise that does not hold; empty where all do."""
    found = list(wrong_before_healing(promise, phase))
    if phase.healing is not None:
        found += [f"healing: {each}" for each in not_calm(phase.healing, phase.result)]
        found += [f"healing: {each}" for each in _unsaid(promise.heal_says, phase.healing.said)]
    elif promise.heals:
        found.append("healing: it was not resumed")
    return tuple(found)


def wrong_before_healing(promise: Promise, phase: Phase) -> tuple[str, ...]:
    """Every part that does not hold of what is promised of the disturbed run itself."""
    return (*_ending(promise, phase.ending), *_accepted(promise, phase))


def not_calm(ending: Ending, result: str) -> tuple[str, ...]:
    """What keeps a run that nothing disturbs from being right: exit 0, the undisturbed bits, nothing left."""
    found = _common(ending)
    if any(ending.codes):
        found.append(f"exit {_codes(ending)}: {last_line(ending.said)}")
    if result:
        found.append(f"other bits: {result}")
    return tuple(found)


def doubt(phase: Phase, found: tuple[str, ...], due: str) -> str:
    """Why a phase without its guard does not show that the judge notices, whatever is wrong; empty where it does.

    What was planted never acted, or broke; or what was `found` wrong is not what must be (`due`, one of several by
    `one|other`): a trainer that refuses the control's own settings is no unguarded trainer.
    """
    if phase.idle:
        return f"never acted: {', '.join(phase.idle)}"
    said = [each.said for each in (phase.ending, phase.healing) if each is not None and _TRACEBACK in each.said]
    if said:
        return f"it ends with a traceback: {last_line(said[0])}"
    if found and not any(_is_in(due, each) for each in found):
        return f"{found[0]}; to be found was {due!r}"
    return ""


def last_line(said: str) -> str:
    """The last line of what was said."""
    return (said.strip().splitlines() or ["nothing was said"])[-1]


def line_with(said: str, words: tuple[str, ...]) -> str:
    """The line that says most of the words, the last of those; the last line of all where none says any."""
    lines = said.strip().splitlines()
    scores = [sum(_is_in(word, line) for word in words) for line in lines]
    best = max(scores, default=0)
    return next(
        (line for line, score in zip(lines[::-1], scores[::-1], strict=True) if best and score == best), ""
    ) or (last_line(said))


def _common(ending: Ending) -> list[str]:
    found = [] if ending.codes else ["nothing was started"]
    if ending.hung:
        found.append(f"not over {ending.seconds:.1f} s after it began")
    if ending.left:
        found.append(f"{ending.left} processes left")
    if _TRACEBACK in ending.said:
        found.append("a traceback")
    return found


def _ending(promise: Promise, ending: Ending) -> list[str]:
    found = _common(ending)
    if not ending.hung and any(code not in promise.codes for code in ending.codes):
        found.append(f"exit {_codes(ending)} instead of {' or '.join(map(str, promise.codes))}")
    if not ending.hung and ending.seconds > promise.within_s:
        found.append(f"over after {ending.seconds:.2f} s, promised were {promise.within_s:g}")
    return found + _unsaid(promise.says, ending.said)


def _accepted(promise: Promise, phase: Phase) -> list[str]:
    found = [f"accepted, but the undisturbed run has no such: {each}" for each in phase.other[:3]]
    if promise.at_once:
        found += [f"accepted after the fault at step {phase.struck.step}: {each}" for each in phase.newer[:3]]
    return found


def _unsaid(words: tuple[str, ...], said: str) -> list[str]:
    return [f"not said: {word!r}" for word in words if not _is_in(word, said)]


def _is_in(word: str, said: str) -> bool:
    return any(each in said for each in word.split("|"))


def _codes(ending: Ending) -> str:
    return " ".join(map(str, ending.codes))
