"""The `andon` command. Starts fast: torch and what needs it are imported by the commands that need them."""
