"""The float64 reference in one process: decoder, encoder, loss, update and loop, written from their definitions.

It shares no code with any trainer, and uses no model class of transformers (which cast to float32 inside, even after
`.double()`), so an error of the subject is not an error of the judge. It draws no random numbers: dropout masks are
arguments.
"""
