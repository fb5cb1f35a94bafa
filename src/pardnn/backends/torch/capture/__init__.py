"""Capture: from an unmodified training step to a graph."""
