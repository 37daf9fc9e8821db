"""Slow links and ranks that are not met, on runs under torchrun: rows 10, 16 and 17 of the catalogue of issue 5."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from andon_falsify.nemesis.between_hosts import ANSWER_S, ENDS, LAST_INTERFACE, STRIKES, BetweenHosts, ranks_of
from andon_falsify.nemesis.protocol import Launch, Nemesis, NotStruckError, Promise, Struck
from andon_falsify.nemesis.run import TIMEOUT_S, Run
from andon_falsify.nemesis.schedule import send


@dataclass(frozen=True, kw_only=True)
class Slow(BetweenHosts):
    """What the last host sends comes slowly, at `rate`. ends: whether that is to end the run (its deadline)."""

    rate: str
    ends: bool = False

    def inject(self, run: Run) -> Struck:
        """Throttle until a rank has said that it is slow, or all have ended."""
        run.reach(STRIKES)
        at, step = time.monotonic(), run.steps
        last = self.hosts(run)[-1]
        last.throttle(self.rate)
        bucket = last.sends_by()
        if not bucket.startswith("qdisc tbf "):
            raise NotStruckError(f"the last host sends by {bucket}")
        if not self.ends:
            run.wait_for(lambda: "usually takes" in run.said(), "said to be slow", ANSWER_S)
            last.unthrottle()
            made = f"; {run.steps - step} updates were made in {time.monotonic() - at:.1f} s"
        return Struck(at, step, f"the last host sends by {bucket}{'' if self.ends else made}")

    def undo(self, run: Run) -> None:
        """Let it send as before."""
        if self.ends:
            self.hosts(run)[-1].unthrottle()


@dataclass(frozen=True, kw_only=True)
class Missing(BetweenHosts):
    """One rank is stopped before it meets the others."""

    def inject(self, run: Run) -> Struck:
        """Stop one of them as soon as it is there; once another has ended, its agent is ended too."""
        run.wait_for(lambda: len(ranks_of(run)) == self.size, "all ranks there")
        at, stopped = time.monotonic(), ranks_of(run)[-1]
        seen = send(stopped, signal.SIGSTOP)
        if seen is None or not seen.startswith("stopped"):
            raise NotStruckError(f"process {stopped} had ended: {seen}")
        waited = self._first_ended(run)
        if waited is not None:
            run.commands[-1].kill()
        return Struck(at, 0, f"process {stopped} is {seen}; another rank ended after {waited} s")

    def _first_ended(self, run: Run) -> float | None:
        began = time.monotonic()
        while time.monotonic() - began < ANSWER_S:
            if any(command.poll() is not None for command in run.commands[:-1]):
                return round(time.monotonic() - began, 1)
            time.sleep(0.01)
        return None


@dataclass(frozen=True, kw_only=True)
class WrongInterface(BetweenHosts):
    """The last host's ranks are told to use an interface that it does not have."""

    before_start: bool = True

    def launch(self, *, guarded: bool) -> Launch:
        """With the wrong name."""
        return self.heal(guarded=guarded).but(environment=((LAST_INTERFACE, "nowhere0"),))

    def heal(self, *, guarded: bool) -> Launch:
        """Without it."""
        return Launch(workers="")

    def calm(self) -> Launch:
        """Without it."""
        return self.heal(guarded=True)

    def inject(self, run: Run) -> Struck:
        """Nothing runs yet: the next start is told so."""
        return Struck(time.monotonic(), 0, "GLOO_SOCKET_IFNAME=nowhere0 on the last host")


_SLOW = "exchange in the update of step|slow: in the update of step"

NEMESES: tuple[Nemesis, ...] = (
    Slow(
        name="slow link",
        numbers=(10,),
        how="a token bucket of 24 kbit/s at one host",
        rate="24kbit",
        promise=Promise((0,), (_SLOW,), heal_says=("is finished",)),
        no_guard="nothing ends the run",
    ),
    Slow(
        name="slow link, deadline of a step",
        numbers=(10,),
        how="the same, with run.step_deadline_s=1.5",
        rate="24kbit",
        ends=True,
        settings=("run.step_deadline_s=1.5",),
        promise=Promise(ENDS, ("took longer than run.step_deadline_s, 1.5 s",), 5.0),
        guard="run.step_deadline_s",
        finds="not over",
        off="run.step_deadline_s=null",
    ),
    Missing(
        name="rank missing at the start",
        numbers=(16,),
        how="SIGSTOP before it meets the others",
        promise=Promise((72, -signal.SIGKILL), (f"did not come within {TIMEOUT_S:g} s",)),
        guard="run.timeout_s",
        finds="not over",
    ),
    WrongInterface(
        name="wrong interface",
        numbers=(17,),
        how="GLOO_SOCKET_IFNAME names one that is not there",
        promise=Promise(
            (2, 71),
            ("GLOO_SOCKET_IFNAME: nowhere0: no such interface on host1, only lo, e0", "of 2 cannot join: GLOO_SOCKET"),
        ),
        no_guard="gloo itself refuses such an interface; what is judged is what the ranks say of it",
    ),
)
