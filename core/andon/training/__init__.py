"""A run: material, replicas, epochs around the step, evaluation, what is written down."""
