"""Claims: one for each law, from the evidence of a run to a verdict, whoever made the run.

`table` has them all, `of_trainer` and `of_loop` say which are judged of what one run leaves, `ledgers` of a ledger, and
`clauses` which of them is the law of which clause of the contracts.
"""
