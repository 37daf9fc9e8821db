"""What is claimed beyond the checkers' own claims, in words. Nothing here is slow to import."""

from __future__ import annotations

from andon_falsify.verdict import Claim

HEADS = Claim(
    "heads-quoted",
    1,
    "Every checkpoint and the summary quote a line of the ledger by its number and digest, and it is that line: "
    "no line was cut off after it was quoted. Every confusion matrix that the ledger quotes is there, unchanged, with "
    "the rows and the accuracy of its evaluation.",
    "issue 3",
)
FALLBACK = Claim(
    "cpu-fallback",
    1,
    "Without a usable GPU a run that allows it trains on the CPU, says so, with the same loss.",
    "seed F-DP-004",
)
AVERAGE = Claim(
    "average-law", 1, "average_gradients is the mean over workers; finite for finite input, NaN and Inf propagate."
)
NON_FINITE = Claim("non-finite-seen", 1, "has_non_finite sees NaN, Inf and -Inf at every place.", "seed R28")
SHARDS = Claim("shards-law", 1, "shard_samples gives contiguous shards in order, the last with the remainder.", "R26")
FACE = Claim(
    "coordinator-face", 1, "The coordinator refuses an empty list of devices, and its primary is replica 0.", "R9, R14"
)
