"""What is learned of rows: their tensors, the sum of their losses, and their scores."""
