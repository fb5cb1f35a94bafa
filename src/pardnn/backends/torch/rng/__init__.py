"""Random generators, moved past the draws of other ranks: the numbers are those of one device."""
