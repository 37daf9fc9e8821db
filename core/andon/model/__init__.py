"""Models, adapters and the text-classification task that the step trains."""
