"""Compares what was promised with what was observed, and describes each difference."""

from __future__ import annotations

from .language import Guard, Phase, Promise
from .run import Ending

_TRACEBACK = "Traceback (most recent call last)"


def wrong(promise: Promise, phase: Phase) -> tuple[str, ...]:
    found = list(wrong_before_healing(promise, phase))
    if phase.healing is not None:
        found += [f"healing: {each}" for each in wrong_without_fault(phase.healing, phase.result)]
        found += [f"healing: {each}" for each in _missing(promise.heal_says, phase.healing.output)]
    else:
        found.append("healing: it was not resumed")
    return tuple(found)


def wrong_before_healing(promise: Promise, phase: Phase) -> tuple[str, ...]:
    """Every broken part of a promise that concerns the disturbed run itself."""
    ending = phase.ending
    found = _common(ending)
    if not ending.hung and any(code not in promise.codes for code in ending.codes):
        found.append(f"exit {codes_of(ending)} instead of {' or '.join(map(str, promise.codes))}")
    if not ending.hung and ending.seconds > promise.within_s:
        found.append(f"over after {ending.seconds:.2f} s, promised were {promise.within_s:g}")
    found += _missing(promise.says, ending.output)
    found += [f"accepted, but the undisturbed run has no such: {each}" for each in phase.other[:3]]
    if promise.at_once:
        found += [f"accepted after the fault at step {phase.struck.step}: {each}" for each in phase.newer[:3]]
    return tuple(found)


def wrong_without_fault(ending: Ending, result: str) -> tuple[str, ...]:
    """What is wrong with a run without faults. It must exit with 0, have the undisturbed bits and leave no process."""
    found = _common(ending)
    if any(ending.codes):
        found.append(f"exit {codes_of(ending)}: {last_line(ending.output)}")
    if result:
        found.append(f"other bits: {result}")
    return tuple(found)


def doubt(phase: Phase, found: tuple[str, ...], guard: Guard | str) -> str:
    """Why a phase without its guard does not prove that the judge notices; empty if it does.

    A plant never acted or broke, or the judge did not find what the guard says: a trainer that rejects the control's
    settings is not an unguarded trainer.
    """
    if phase.idle:
        return f"never acted: {', '.join(phase.idle)}"
    output = [each.output for each in (phase.ending, phase.healing) if each is not None and _TRACEBACK in each.output]
    if output:
        return f"it ends with a traceback: {last_line(output[0])}"
    due = guard.finds if isinstance(guard, Guard) else ""
    if found and not any(_is_in(due, each) for each in found):
        return f"{found[0]}; to be found was {due!r}"
    return ""


def last_line(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1]


def codes_of(ending: Ending) -> str:
    return " ".join(map(str, ending.codes))


def _common(ending: Ending) -> list[str]:
    found = [] if ending.codes else ["nothing was started"]
    if ending.hung:
        found.append(f"not over {ending.seconds:.1f} s after it began")
    if ending.left:
        found.append(f"{ending.left} processes left")
    if _TRACEBACK in ending.output:
        found.append("a traceback")
    return found


def _missing(words: tuple[str, ...], output: str) -> list[str]:
    return [f"not said: {word!r}" for word in words if not _is_in(word, output)]


def _is_in(word: str, output: str) -> bool:
    return any(each in output for each in word.split("|"))
