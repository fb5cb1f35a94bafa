"""Data-dependent code of a step: where it ends, and what it leaves behind."""
