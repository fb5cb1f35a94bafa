"""Plans of a batch in pieces: how many pieces, placed in stages or piece by piece."""
