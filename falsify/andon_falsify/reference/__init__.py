"""The law in one process and float64: decoder, encoder, loss, update and loop, written from their definitions.

It shares no code with any trainer and uses no model class of transformers (which casts to float32 inside, even after
`.double()`), so an error of the accused is not an error of the judge. Randomness is never drawn here: dropout masks are
given.
"""

from __future__ import annotations
