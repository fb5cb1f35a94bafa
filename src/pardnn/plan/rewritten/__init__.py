"""Graphs that a plan rewrites before it places them, and their checks."""
