"""Any data-parallel training loop as a subject: what it offers, and how it is observed from outside.

`make(case)` returns a `Loop` on every rank; `andon falsify --subject module:make` judges it.
"""
