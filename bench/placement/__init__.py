"""Placements: quality, memory, time, and published problems."""
