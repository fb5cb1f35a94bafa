"""The memory of a rank: limits, fixed places and measurement."""
