"""Guards on Python values: gathered once from what a step can reach, compared at every call."""
