"""The memory of a rank: limits, places, and what is measured."""
