"""What the command shows its user: exit codes, input errors, log lines and results."""
