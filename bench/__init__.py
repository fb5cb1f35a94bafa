"""Benchmarks: `python -m bench` runs the quick one, `python -m bench NAME` each of them."""
