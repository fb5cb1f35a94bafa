"""Graphs that a plan cuts over the devices of a mesh: their checks."""
