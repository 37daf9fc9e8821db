"""The commands of this package, which join `andon` as entry points."""
