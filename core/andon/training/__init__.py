"""A training run: data and model, the loop of epochs around `andon.step`, evaluation, output files."""
