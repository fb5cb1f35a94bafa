"""The decision: which device runs each op, in which order, with which messages."""
