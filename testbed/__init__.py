"""What tests and benchmarks share: models, captured graphs, made-up graphs, calls of operators."""

from pathlib import Path

#: Lists of operators and published placement problems.
DATA = Path(__file__).parent / "data"
#: Captured steps, gzipped.
GRAPHS = Path(__file__).parent / "graphs"
