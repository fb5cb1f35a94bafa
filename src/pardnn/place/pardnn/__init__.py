"""ParDNN: slicing, mapping, refinement, memory."""

from pardnn.place.pardnn.pardnn import place_pardnn

__all__ = ["place_pardnn"]
