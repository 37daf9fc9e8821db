"""Bad input in large numbers: everything that Andon reads from a file ends in the promised error, or is right."""
