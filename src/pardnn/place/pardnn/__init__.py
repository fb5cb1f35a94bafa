"""ParDNN: slicing, mapping, refinement, memory."""
