"""What runs: one training step as a graph of ops on tensors."""
