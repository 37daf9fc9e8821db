"""The `andon` command. It starts fast: only the commands that need torch import it."""
