"""The laws of each point of a step, shared by the trainer and the watch."""
