"""From an algorithm's name to a checked plan."""
