"""Random generators, advanced past draws of other ranks: the numbers are those of one device."""
