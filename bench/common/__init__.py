"""What several benchmarks use."""

from pathlib import Path

#: Where the dated pages lie.
RESULTS = Path(__file__).parents[1] / "results"
