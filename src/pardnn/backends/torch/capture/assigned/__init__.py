"""What a step leaves in its user's objects, followed from trace to trace."""
