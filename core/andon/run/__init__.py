"""What a run leaves on disk, written whole or not at all. Knows no model."""
