"""Claims: one module for each, from the evidence of a run to a verdict, whoever made the run.

A claim's module has, from top to bottom, `CLAIM` (a `Claim`, with the further runs and the needs of its check),
`check(evidence: Evidence) -> Verdict` for every kind of subject, and what only that check uses. It imports torch, and
what imports torch, inside functions: `andon verify` judges ledgers without torch. What several claims use lies in
modules without a `CLAIM`. A check is called only if no need of the claim gives a reason not to.
"""
