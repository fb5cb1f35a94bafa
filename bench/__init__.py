"""Benchmarks: `python -m bench` runs the quick ones."""
