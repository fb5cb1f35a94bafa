"""Local search over a finished plan."""
