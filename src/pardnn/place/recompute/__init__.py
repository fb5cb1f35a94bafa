"""What is computed twice, so that a step fits: retention intervals, their search, the calls."""
