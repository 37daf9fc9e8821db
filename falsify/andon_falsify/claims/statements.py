"""What is claimed beyond the checkers' own claims, in words. Nothing here is slow to import."""

from __future__ import annotations

from andon_falsify.verdict import Claim

UPDATE = Claim(
    "update-law",
    1,
    "The weights after an update are those of one optimizer step from the weights before it, with the reduced "
    "gradient clipped once and the rate of the schedule.",
    "seed V5, V7, V38",
)
NORM = Claim(
    "norm-law", 1, "The reported norm is that of the reduced gradient of the law before clipping.", "seed V6, D4"
)
BASE = Claim("base-frozen", 1, "No frozen weight or buffer of any rank changes in a run.", "seed V35, F-FREEZE-003")
EVALUATION = Claim(
    "evaluation-law",
    2,
    "The loss and the accuracy of an evaluation, on every rank that reports them, are those of every row once, "
    "whatever the number of ranks, the padding and the order; and it changes nothing in the model.",
    "seed V8; accelerate even_batches, HF eval_loss",
)
RANDOMNESS = Claim(
    "randomness-apart",
    2,
    "What draws random numbers in training (dropout, noise) draws them in every forward pass, and ranks draw different "
    "ones.",
    "faults F55, F56, F58",
)
HEADS = Claim(
    "heads-quoted",
    1,
    "Every checkpoint and the summary quote a line of the ledger by its number and digest, and it is that line: "
    "no line was cut off after it was quoted. Every confusion matrix that the ledger quotes is there, unchanged, with "
    "the rows and the accuracy of its evaluation.",
    "issue 3",
)
