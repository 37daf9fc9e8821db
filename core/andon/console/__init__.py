"""All that a user of the command is told: exit codes, his mistakes all at once, lines on a terminal."""
