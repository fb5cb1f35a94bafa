"""The user's step: its object graph, and the sources of its values."""
