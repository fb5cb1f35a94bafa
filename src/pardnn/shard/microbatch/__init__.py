"""The batch of a step cut into pieces: microbatches found by analysis."""
