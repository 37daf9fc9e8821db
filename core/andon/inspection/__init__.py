"""What a run left, read afterwards: shown, compared with another, done again. No file of the run is changed."""
