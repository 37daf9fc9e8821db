"""Faults brought about in real runs of the trainer, proved, undone, and judged: `python -m andon_falsify.nemesis`.

Issue 5, item 6. Each fault is one small object (`protocol.Nemesis`); `bench` plays it, `registry` has all of them.
"""
