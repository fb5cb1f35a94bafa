"""The batch of a step cut in pieces: microbatches found by analysis."""
