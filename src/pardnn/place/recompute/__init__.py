"""Second calls of ops, so that a step fits: retention intervals, their search, the calls."""
