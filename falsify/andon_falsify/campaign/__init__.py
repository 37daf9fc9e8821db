"""From a seed and a budget to findings: which cases are run on a subject, what they say of each claim, and why."""
