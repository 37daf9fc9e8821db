"""Bad input in large numbers: whatever is read from a file ends in the error that was promised, or is right.

`python -m falsify.nemesis.fuzz --cases 20000 --seed 0`.
"""
