"""Compiled building blocks that know no graph: heaps, trees, sorting."""
