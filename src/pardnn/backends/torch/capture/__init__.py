"""From an unmodified training step to a graph."""
