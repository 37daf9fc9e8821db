"""How long the pulse of a rank waits, and for what: all in seconds, and shorter where a user's own bound is short."""

from __future__ import annotations

from dataclasses import dataclass

_BEAT_S = 0.5
_LOOK_S = 0.2
_SLOW_S = 10.0
"""What lasts shorter is not slow, whatever is usual."""
_SILENCE_S = 2.0
_PAUSE_S = 1.0


@dataclass(frozen=True)
class Bounds:
    """timeout_s: a rank that others have waited for so long is given up. step_s: an update that takes longer ends the
    run; None: none does. silence_s: for how long a rank that lives may give no sign of it; None: by the timeout."""

    timeout_s: float
    step_s: float | None = None
    silence_s: float | None = None

    @property
    def slow_s(self) -> float:
        """From how many seconds on something may be slow."""
        return min(_SLOW_S, self.timeout_s / 2)

    @property
    def silent_s(self) -> float:
        """From how many seconds on a rank is silent: several beats."""
        return min(_SILENCE_S, self.timeout_s / 3) if self.silence_s is None else self.silence_s

    @property
    def pause_s(self) -> float:
        """From how many seconds on a time in which this process did not run is a pause, which counts for nothing."""
        return min(_PAUSE_S, self.timeout_s / 4)

    @property
    def beat_s(self) -> float:
        """Seconds between two signs of life."""
        return min(_BEAT_S, self.timeout_s / 10)

    @property
    def look_s(self) -> float:
        """Seconds between two looks at what is known."""
        return min(_LOOK_S, self.timeout_s / 10)
