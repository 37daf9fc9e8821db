"""Any data-parallel training loop as a subject: what it offers, and how it is observed from outside."""
